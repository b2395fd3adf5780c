"""Tries parameters of a space, a trial on each rank, as Optuna proposes them."""
