"""Data sets of images and what can be done with them: split, transform, check, preview."""
