"""An amount of memory as people write it: `90%` of what there is, `12GiB`, `500MB`, or bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isfinite

from jobs.errors import invalid

UNITS = {
    "": 1,
    "b": 1,
    **{"k": 10**3, "kb": 10**3, "kib": 2**10},
    **{"m": 10**6, "mb": 10**6, "mib": 2**20},
    **{"g": 10**9, "gb": 10**9, "gib": 2**30},
    **{"t": 10**12, "tb": 10**12, "tib": 2**40},
}
FORM = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(%|[a-z]*)", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True)
class MemoryAmount:
    """Exactly one of `share`, from 0 to 1, and `nbytes` is set."""

    share: float | None = None
    nbytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> MemoryAmount:
        """Raises JobError("invalid_request")."""
        found = FORM.fullmatch(text.strip())
        number, unit = (float(found[1]), found[2].lower()) if found else (0.0, "")
        if unit == "%" and 0 < number <= 100:
            return cls(share=number / 100)
        if unit in UNITS and isfinite(number) and number * UNITS[unit] >= 1:
            return cls(nbytes=int(number * UNITS[unit]))
        raise invalid(
            f"{text!r} is no amount of memory: give a percentage up to 100%, a size such as 12GiB "
            "or 500MB, or bytes",
            "memory",
        )

    def of(self, total: int, device: str) -> int:
        """The bytes, on a device with `total` bytes. Raises JobError("invalid_request") for more
        than it has."""
        if self.nbytes is None:
            return int(total * (self.share or 0.0))
        if self.nbytes > total:
            raise invalid(
                f"memory: {self.nbytes / 2**30:.1f} GiB are more than the {total / 2**30:.1f} GiB "
                f"that {device} has",
                "memory",
            )
        return self.nbytes
