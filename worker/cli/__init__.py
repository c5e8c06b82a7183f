"""The commands that the worker package adds to `chatjobs`: work, demo and models."""
