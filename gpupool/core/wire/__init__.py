"""What crosses between processes, and how it is packed, named and masked. Runs anywhere."""
