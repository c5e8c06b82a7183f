"""The processes of followers end with their leader, and listen to nobody else."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.api.sampling import Sampling
from jobs.errors import JobError
from tests.waiting import has_ended, wait_until
from tests.worker.checkpoints import make_checkpoint
from tests.worker.ranks.engines import followers, load
from worker import Engine
from worker.cache.changes import Resize
from worker.engine.follower import _changed
from worker.engine.runner import ModelRunner, StorageError
from worker.layers.cache import Size
from worker.layers.shard import WHOLE
from worker.ranks.messages import Change, Changed

LEADER = """
import sys, time
from worker import Engine
engine = Engine.load("demo", device="cpu", dtype="fp32", tensor_parallel=3)
print(*engine._core.runner.ranks.pids, flush=True)
time.sleep(3600)
"""


def test_followers_end_with_a_leader_that_is_killed(tmp_path: Path) -> None:
    """Also one that is stopped."""
    heads = make_checkpoint(tmp_path, "qwen3", num_attention_heads=6, num_key_value_heads=3)
    code = LEADER.replace('"demo"', repr(str(heads)))
    leader = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert leader.stdout is not None
    pids = [*map(int, leader.stdout.readline().split())]
    try:
        assert len(pids) == 2
        os.kill(pids[1], signal.SIGSTOP)
        leader.kill()
        leader.wait()
        wait_until(lambda: all(map(has_ended, pids)))
    finally:
        leader.stdout.close()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_followers_end_with_the_engine(start: Callable[..., Engine]) -> None:
    closed = start(2)
    pids = followers(closed)
    closed.close()
    assert all(map(has_ended, pids))
    dropped = load("demo", 2)
    pids = followers(dropped)
    del dropped
    gc.collect()
    wait_until(lambda: all(map(has_ended, pids)))


def test_ranks_listen_nowhere(both: tuple[Engine, Engine]) -> None:
    """They have a socket and memory of the leader, and neither has a name."""
    for pid in followers(both[1]):
        inodes = set()
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(os.readlink(descriptor))
        assert any(one.startswith("socket:") for one in inodes)
        for protocol in ("tcp", "tcp6", "udp", "udp6"):
            table = Path(f"/proc/{pid}/net/{protocol}")
            lines = table.read_text().splitlines()[1:] if table.exists() else []
            assert not [one for one in lines if f"socket:[{one.split()[9]}]" in inodes]
        unix = Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]
        mine = [one.split() for one in unix if f"socket:[{one.split()[6]}]" in inodes]
        assert mine and all(len(fields) == 7 for fields in mine)  # no path


def test_storage_that_a_follower_lacks_is_lacking_for_all(both: tuple[Engine, Engine]) -> None:
    class Lacking:
        """A follower without memory."""

        layers = ()

        def execute(self, change: Any) -> None:
            raise MemoryError("no memory there")

    resize = Resize(Size(2, 64, 8), 0)
    follower = ModelRunner.__new__(ModelRunner)
    follower.pool = Lacking()  # type: ignore[assignment]
    reply = _changed(follower, Change((resize,)))
    assert reply == Changed(resize, "no memory there")

    class Replying:
        """The ranks of a leader, one of which lacks memory."""

        shard = WHOLE

        def together(self) -> Any:
            return nullcontext()

        def send(self, message: Any) -> None:
            assert message == Change((resize,))

        def replies(self) -> list[Changed]:
            return [Changed(), reply]

    model = both[0]._core.runner.model
    leader = ModelRunner(model, both[0]._core.runner.pool, torch.device("cpu"), ranks=Replying())  # type: ignore[arg-type]
    leader.pool = Accepting()  # type: ignore[assignment]
    with pytest.raises(StorageError) as caught:
        leader.apply([resize])
    assert str(caught.value.__cause__) == "no memory there"


class Accepting:
    def execute(self, change: Any) -> None:
        """All changes."""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_each_rank_runs_on_its_cores() -> None:
    """A load that fails leaves the caller's thread where it was."""
    before = os.sched_getaffinity(0)
    first, second = sorted(before)[:2]
    names = [f"cpu:{first}", f"cpu:{second}"]
    try:
        engine = Engine.load("demo", dtype="fp32", tensor_parallel=2, devices=names)
        try:
            assert os.sched_getaffinity(0) == {first}
            assert os.sched_getaffinity(followers(engine)[0]) == {second}
            assert engine.generate([[5, 6]], Sampling(temperature=0, max_tokens=2))
        finally:
            engine.close()
        os.sched_setaffinity(0, before)
        with pytest.raises(JobError):
            Engine.load("no-such-model", tensor_parallel=2, devices=names)
        assert os.sched_getaffinity(0) == before
    finally:
        os.sched_setaffinity(0, before)
