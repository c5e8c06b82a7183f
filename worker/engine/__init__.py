"""Generation with one model: scheduling, steps, sampling and kept state."""
