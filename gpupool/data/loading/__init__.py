"""Batches for a rank: how a data set is read best, by threads or processes, and in order."""
