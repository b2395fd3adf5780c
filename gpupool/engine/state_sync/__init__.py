"""Copies named state from one rank to others. Runs on engines."""
