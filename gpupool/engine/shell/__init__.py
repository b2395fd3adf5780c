"""The IPython shell of a rank, and whose code a line belongs to. Runs on engines."""
