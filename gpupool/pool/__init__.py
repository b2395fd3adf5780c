"""The client's view of the engines. Runs on the client; imports no torch."""
