"""From messages to token ids, by the chat template of the model."""
