"""Measures while the engine runs whether drafts save time, by batch size."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean, median

SHARE = 0.005  # of the engine's time, that drafts may lose
SAVED = 120.0  # seconds of engine time whose share can be saved up for later losses
SAMPLES = 5  # measured steps that count: the last ones
ENOUGH = 3  # steps without drafts before the first with them
PROBE_STEPS = 3  # steps with drafts in a probe
REFRESH = 128  # steps with drafts until one without them is measured again
FIRST_PAUSE, LONGEST_PAUSE = 16, 2048  # steps from a probe that lost time to the next one
PROBE_INTERVAL = 8  # measure one step in eight during a pause


@dataclass(slots=True)
class Size:
    """Measurements of batches of similar size."""

    # Seconds of the last steps without drafts.
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    # Seconds that the last steps with drafts have saved, since a pause; lost ones are negative.
    gains: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    age: int = 0  # steps with drafts since the last one without
    left: int = 0  # steps of the pause that are left
    unmeasured: int = 0  # steps until one is measured
    pause: int = FIRST_PAUSE  # the next one

    @property
    def seconds(self) -> float:
        """The mean time of a step without drafts, without the least and the greatest one."""
        return fmean(sorted(self.plain)[1:-1])

    def pauses(self) -> bool:
        """True if a step belongs to a pause and is not measured."""
        if not self.unmeasured:
            return False
        self.unmeasured, self.left = self.unmeasured - 1, max(0, self.left - 1)
        return True

    def add_plain(self, seconds: float) -> None:
        self.plain.append(seconds)
        self.age, self.left = 0, max(0, self.left - 1)

    def add_gain(self, seconds: float) -> None:
        """Pause if most of the last steps lost time."""
        self.gains.append(seconds)
        self.age += 1
        if len(self.gains) >= PROBE_STEPS and median(self.gains) < 0:
            self.stop()
        elif len(self.gains) == SAMPLES:
            self.pause = FIRST_PAUSE

    def stop(self) -> None:
        """Pause, each time longer."""
        self.gains.clear()
        self.left, self.pause = self.pause, min(2 * self.pause, LONGEST_PAUSE)


class DraftCosts:
    """Compares the time of steps that have drafts with what their tokens take without.

    Batch sizes are grouped by powers of two, and measured as long as the engine lives. In each
    group, a probe of PROBE_STEPS steps uses drafts. Drafts go on while most steps gain time, and
    pause when most lose it.

    An account bounds the losses. Its income is SHARE of the time of all steps, and the gains. It
    pays the losses, and the time of proposers that proposed nothing. While it is overdrawn, no
    probe starts. Once the debt exceeds the cost of REFRESH steps, active drafting pauses as well.
    Drafts that never pay cost SHARE of the time, plus one initial probe.

    Steps that also compute prompts have no drafts, since their gain could not be measured. `clock`
    is in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._sizes: defaultdict[int, Size] = defaultdict(Size)
        self.probes = False  # this step belongs to a probe
        self._account = 0.0  # seconds
        self._began, self._spent, self._drawing = 0.0, 0.0, 0
        self._measured = False  # this step is measured

    def pauses(self, sequences: int) -> bool:
        """Begin a step of so many sequences. True if it belongs to a pause and is not measured."""
        self._began, self._measured = self._clock(), False
        return self._sizes[sequences.bit_length()].pauses()

    def begin(self, drawing: int, *, whole: bool) -> bool:
        """Continue a step that `pauses` did not skip. `drawing`: its sequences that draw a token;
        `whole`: it has no others. True if they draft."""
        self._spent, self._drawing, self._measured = 0.0, drawing, whole
        size = self._sizes[drawing.bit_length()]
        if not drawing or not whole or len(size.plain) < ENOUGH or size.age >= REFRESH:
            return False
        self.probes = len(size.gains) < PROBE_STEPS
        if size.left or (self._account < 0 and not size.gains):
            size.unmeasured = PROBE_INTERVAL - 1
            return False
        return True

    def proposed(self) -> None:
        """The proposer has returned, with drafts or with none."""
        self._spent = self._clock() - self._began

    def end(self, drafted: int, accepted: int) -> None:
        """End a step that computed so many drafted tokens, of which `accepted` were right."""
        seconds = self._clock() - self._began
        self._account = min(self._account + SHARE * seconds, SHARE * SAVED)
        if not self._measured:
            return
        size = self._sizes[self._drawing.bit_length()]
        if drafted:
            gain = size.seconds * (1 + accepted / self._drawing) - seconds
            size.add_gain(gain)
            self._account += gain
        else:
            size.add_plain(seconds - self._spent)
            self._account -= self._spent
        if size.gains and self._account < -REFRESH * size.seconds:
            size.stop()
