"""Builds prompts: from messages to token ids, with the model's chat template."""
