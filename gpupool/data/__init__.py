"""From an object store to batches. Runs anywhere; imports torch only to decode."""
