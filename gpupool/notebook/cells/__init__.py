"""Shows what the ranks of a cell print and raise. Runs on the client."""
