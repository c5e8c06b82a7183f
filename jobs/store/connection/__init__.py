"""How Redis is reached: URLs, clients, subscriptions, the protocol of sync and async clients."""
