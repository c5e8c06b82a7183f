"""Quantises models: values → GGUF's blocks, and model folders → GGUF files."""
