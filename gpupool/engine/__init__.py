"""What runs on the engines, one process per GPU. The client's calls are types: see `entry.py`."""
