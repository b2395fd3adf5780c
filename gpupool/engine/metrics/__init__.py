"""Metrics and evaluation of a network over a data set. Runs on engines."""
