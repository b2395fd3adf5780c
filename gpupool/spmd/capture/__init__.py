"""Which names of the notebook a cell reads and binds. Runs on the client."""
