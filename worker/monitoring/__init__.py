"""What an operator's tools ask a worker over HTTP: probes and metrics."""
