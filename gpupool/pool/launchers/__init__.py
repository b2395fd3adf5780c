"""Who starts the processes of a pool, and where. Runs on the client."""
