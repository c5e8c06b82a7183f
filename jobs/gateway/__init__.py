"""The HTTP gateway: OpenAI's API over the queue. Needs the extra `gateway`."""
