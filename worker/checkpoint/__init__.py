"""The files of a model in Hugging Face's layout: configuration, tokenizer, safetensors; and the
interfaces of a model's files, which GGUF files implement, too."""
