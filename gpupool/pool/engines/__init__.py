"""The processes of a pool, from start to stop, and the connection to them. Runs on the client."""
