"""This machine: its GPUs, cores, limits, processes, folders and locks. Runs anywhere."""
