"""The backend whose models run behind an OpenAI-compatible HTTP server. It needs no torch."""
