"""Which models of a worker are in memory: the budget of the device and its shares."""
