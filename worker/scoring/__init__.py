"""Scoring requests: the token ids of their items, and the sequences that score them."""
