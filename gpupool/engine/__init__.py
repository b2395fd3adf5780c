"""What runs on the engines, one process per GPU. The client calls it by name: see `entry.py`."""
