"""Speculative decoding: drafts of the next tokens, and the choice of how many are worth it."""
