"""Variables between notebook and ranks, and handles of them. Runs on the client."""
