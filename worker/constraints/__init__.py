"""Constrained output: the grammar of an answer, its state after each token, and masks of logits."""
