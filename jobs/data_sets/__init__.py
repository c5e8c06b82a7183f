"""Data sets: files of rows, read as requests, for commands and for Ray Data."""
