"""Shows a training, or a loop of the user: live, as a picture, and as text. Runs on the client."""
