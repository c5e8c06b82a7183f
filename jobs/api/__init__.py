"""The wire types: request, sampling parameters, answer and chunk."""
