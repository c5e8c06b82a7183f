"""The API for generation in the same process."""
