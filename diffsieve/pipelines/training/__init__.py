"""Training: loop, checkpoints, optimiser, settings; the parts of mini-wan; `pixel_dit` in a folder of its own."""
