"""Shows a training: live, as a picture, and as text. Runs on the client."""
