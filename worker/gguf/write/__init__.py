"""Writes GGUF files from model folders in Hugging Face's layout, quantised or not."""
