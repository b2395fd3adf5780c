"""Shows on this machine what gpupool promises: one line for each promise, with a figure."""
