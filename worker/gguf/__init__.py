"""GGUF files: what readers and writers share, the reader and the writer."""
