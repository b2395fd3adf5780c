"""A cell on every rank. Runs in the notebook kernel."""
