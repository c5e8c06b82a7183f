"""From the outbox in Redis to Parquet files, exactly once."""
