"""The IPython shell of a rank, whose code a line belongs to, what is put back. Runs on engines."""
