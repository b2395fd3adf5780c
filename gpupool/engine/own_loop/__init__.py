"""Help for a training loop that the user writes. Runs on engines."""
