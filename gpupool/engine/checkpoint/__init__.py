"""Files of networks and of weights: what they hold, how they are written and read. Engines."""
