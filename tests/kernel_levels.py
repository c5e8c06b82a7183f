"""The levels of CPU kernels that tests compile and run here."""

from __future__ import annotations

import os

from worker.kernels import build
from worker.kernels.build import AMX, AVX2, AVX512, AVX512VNNI, AVXVNNI, Level

# The instructions of `avxvnni` as CPUs with AVX-512 have them, in another encoding.
ENCODED = Level("avxvnni-512", AVXVNNI.features, (*AVX2.flags, "-mavx512vl", "-mavx512vnni"))
EVERY = "CHATJOBS_TEST_EVERY_LEVEL"


def levels_here() -> list[Level]:
    """The best level of this CPU, and the one that all have; beside AMX the one without it, which
    has ways of its own. With the variable EVERY (`make kernels`) also those between: their
    compilation takes a minute each."""
    usable = build.usable_levels()
    if EVERY in os.environ:
        return [*usable, *([ENCODED] if AVX512VNNI in usable else [])]
    beside = AVX512 if AMX in usable else AVX2
    return [level for level in usable if level in (usable[0], beside, AVX2)]
