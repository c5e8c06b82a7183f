"""Results of ended jobs: outbox entries, the schema of a row, the files of a run."""
