"""One call on several ranks: its output, failures, hangs and interrupts. Runs on the client."""
