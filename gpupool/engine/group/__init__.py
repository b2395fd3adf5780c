"""Forms, leaves and aborts the torch process group. Runs on engines."""
