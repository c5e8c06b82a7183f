"""Batches: runs whose data set is an uploaded file, and whose rows become two files."""
