"""Chat requests: the sequences that generate an answer, and its assembly."""
