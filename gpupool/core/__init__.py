"""Words that client, host and engines all speak. Standard library only."""
