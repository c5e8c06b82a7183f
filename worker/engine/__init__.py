"""Generation with one model: scheduling, steps and kept state."""
