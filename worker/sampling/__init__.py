"""Sampling: the options of a request, logits processors, the draw of tokens, log-probabilities."""
