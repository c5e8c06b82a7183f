"""Opens models: folders and hub repositories, their configuration, tokenizer and weights."""
