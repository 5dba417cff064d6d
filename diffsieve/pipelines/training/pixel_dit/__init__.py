"""Training of the pixel-space DiT: picture sets, the emoji set, the stage, export and measurement."""
