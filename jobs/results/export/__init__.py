"""One file of the rows of a run, in formats that other programs read."""
