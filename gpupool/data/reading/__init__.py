"""From bytes to batches: reading ahead, decoding, augmentation and shards. Runs on engines."""
