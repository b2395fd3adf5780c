"""Keeps a pool usable: turns, health, process groups and replaced ranks. Runs on the client."""
