"""The engines of a pool: states, calls, and what they publish. Runs on the client."""
