"""What plots are made of: axes with ticks, the looks of lines, and SVG."""
