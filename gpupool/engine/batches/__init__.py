"""The share that a rank has of each global batch. Runs on engines."""
