"""Training: loop, checkpoints, optimiser and settings, the parts of mini-wan, and `pixel_dit` in a folder of its own."""
