"""Loads models onto a device: checks, device and dtype, weights."""
