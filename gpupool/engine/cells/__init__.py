"""Runs a cell on a rank, with the notebook's values, and reports how it went. Runs on engines."""
