"""How the demo model is made: synthetic tasks, tokenizer, training loop. Not shipped."""
