"""The backend of a worker: threads that prepare requests and step the engines."""
