"""The KV cache: what is known of it, its memory, prefixes that are kept, and state in files."""
