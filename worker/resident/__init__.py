"""Making a model resident: preflight, device and dtype, weights in place."""
