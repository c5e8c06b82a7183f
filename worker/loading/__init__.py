"""Reading model folders and hub repositories: config, tokenizer, weights."""
