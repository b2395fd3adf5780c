"""The environment variables and credentials of the ranks. Runs on the client."""
