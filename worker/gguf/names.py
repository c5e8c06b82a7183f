"""The names of tensors that the reader and the writer of GGUF files look for."""

from __future__ import annotations

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
# Divisors of RoPE's frequencies, one for each pair of channels.
FREQUENCIES = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = (FREQUENCIES, LONG, SHORT)
