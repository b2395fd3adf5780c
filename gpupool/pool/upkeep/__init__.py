"""Keeps a pool usable: whose turn it is, and the process group. Runs on the client."""
