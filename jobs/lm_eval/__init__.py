"""The adapter of lm-evaluation-harness: its requests as jobs."""
