"""The routes, one module for each family of paths. Each has `routes(gateway)`."""
