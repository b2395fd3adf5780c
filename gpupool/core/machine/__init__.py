"""This machine: its GPUs, limits, processes and locks. Runs anywhere."""
