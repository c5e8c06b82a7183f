"""Peer engines, each run as a child process by the Python of `make bench-peers`."""
