"""Benchmarks: side by side with public peers, in one run, on stated shapes."""
