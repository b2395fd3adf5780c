"""Runs a cell on a rank and reports how it went. Runs on engines."""
