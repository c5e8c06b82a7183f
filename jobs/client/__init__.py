"""Submitting, following, waiting for and cancelling jobs."""
