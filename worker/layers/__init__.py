"""The building blocks that model families share: linears, norms, RoPE, attention, caches."""
