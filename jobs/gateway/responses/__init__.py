"""Responses of OpenAI's API as chat completions: requests, answers and events in both forms."""
