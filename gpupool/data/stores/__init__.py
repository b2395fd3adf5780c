"""Object stores and file systems: listing, reading, writing, retries, errors; a cache."""
