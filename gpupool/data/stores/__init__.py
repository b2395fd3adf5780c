"""Object stores and file systems: listing, reading, writing, retries and errors. Runs anywhere."""
