"""What all pictures share: HTML, text, progress and the front end. Runs on the client."""
