"""The cache on this host's disk that all its ranks share. Runs anywhere."""
