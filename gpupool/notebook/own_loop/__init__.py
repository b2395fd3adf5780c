"""Shows the monitor of a training loop that the user writes. Runs on the client."""
