"""Shows the pool: its bar, its buttons and its tables. Runs on the client."""
