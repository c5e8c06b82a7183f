"""Runs: a data set whose rows all end in Parquet, by any number of calls of `chatjobs run`."""
