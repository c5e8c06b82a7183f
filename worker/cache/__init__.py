"""The KV cache: its numbers, its memory, kept prefixes, and state in files."""
