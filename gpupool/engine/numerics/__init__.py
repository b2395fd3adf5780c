"""Losses, optimizers, gradients and batch norm. Runs on engines."""
