"""The exchange of ranks by the kind of their devices."""

from __future__ import annotations

from worker.ranks.collectives import Collectives
from worker.ranks.exchange import SharedExchange

EXCHANGES: dict[str, type[SharedExchange | Collectives]] = {
    "cpu": SharedExchange,
    "cuda": Collectives,
}
