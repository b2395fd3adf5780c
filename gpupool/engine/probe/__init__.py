"""Measures time and devices of a rank. Runs on engines."""
