"""Completions: a job for each prompt, in the form of OpenAI's older API."""
