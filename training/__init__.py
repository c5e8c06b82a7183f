"""Trains the demo model: synthetic tasks, tokenizer, training loop. Not in the distribution."""
