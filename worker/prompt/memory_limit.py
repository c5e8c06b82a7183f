"""The limit of a child process's address space, which it sets for itself before it reads input."""

from __future__ import annotations

import resource


def limit_memory(max_bytes: int) -> None:
    """Limit the address space of this process to `max_bytes`, or to less where `ulimit -v` does."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = max_bytes if most == resource.RLIM_INFINITY else min(max_bytes, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
