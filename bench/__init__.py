"""Benchmarks of chatjobs beside a reference, in one run, on fixed model shapes."""
