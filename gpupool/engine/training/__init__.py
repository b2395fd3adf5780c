"""The training loop, and what goes with it. Runs on engines."""
