"""What Redis holds, and the transitions of a job: shared by clients, workers and FakeWorker."""
