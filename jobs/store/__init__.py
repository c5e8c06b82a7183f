"""Owns the keys of Redis and the transitions of a job, for clients, workers and FakeWorker."""
