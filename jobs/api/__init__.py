"""Request, sampling, answer and chunk: the types of the wire, and how they are checked."""
