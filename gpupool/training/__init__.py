"""Training as the notebook sees it. Runs in the notebook kernel."""
