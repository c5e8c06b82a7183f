"""Claiming, running and settling jobs from RQ queues."""
