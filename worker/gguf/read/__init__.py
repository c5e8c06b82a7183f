"""Reads models in GGUF files: header, configuration, tensors under the names of safetensors files,
tokenizer."""
