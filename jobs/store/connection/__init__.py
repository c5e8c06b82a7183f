"""Connections to Redis: URLs, clients, subscriptions, the protocol of sync and async clients."""
