"""The share that a rank has of each global batch, and what reading it took. Runs on engines."""
