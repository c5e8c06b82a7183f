"""Probes and metrics of a worker over HTTP, for the tools of an operator."""
