"""What a run writes: its metrics, where each logger wants them, its signs of life and its curves."""
