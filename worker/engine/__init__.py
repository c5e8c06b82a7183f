"""The generation loop of one model, and the thread that runs it."""
