"""Generation: the loop of one model, the thread that runs it, and the in-process API."""
