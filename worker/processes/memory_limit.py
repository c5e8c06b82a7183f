"""The limit of a process's address space: a child sets its own before it reads input, and
`ulimit -v` may set one for all."""

from __future__ import annotations

import resource


def limit_memory(max_bytes: int) -> None:
    """Limit the address space of this process to `max_bytes`, or to less where `ulimit -v` does."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = max_bytes if most == resource.RLIM_INFINITY else min(max_bytes, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def address_space_advice() -> str:
    """The remedy for a process without memory, if `ulimit -v` limits it; else empty."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return ""
    return f"; `ulimit -v` gives each process {limit >> 20} MiB: raise it"
