"""Finds models by their references, checks that they can run, and loads them onto a device."""
