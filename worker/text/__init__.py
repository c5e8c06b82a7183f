"""From token ids to text: detokenizer, stop strings, reasoning."""
