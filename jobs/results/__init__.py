"""From ended jobs to rows in Parquet: outbox entries, the schema, the files of a run."""
