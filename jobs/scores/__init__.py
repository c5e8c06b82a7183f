"""Metrics over the rows of a run: values per row in the table `scores`, and figures of them."""
