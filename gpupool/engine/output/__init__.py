"""What a rank prints, shows and publishes. Runs on engines."""
