"""The API for callers: submits, follows, waits for and cancels jobs."""
