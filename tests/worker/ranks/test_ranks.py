"""Engines whose models are on several ranks, with real processes that are really killed."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.api.sampling import Sampling
from jobs.errors import InvalidRequest, JobError
from tests.waiting import has_ended, wait_until
from tests.worker.checkpoints import make_checkpoint
from worker import Engine
from worker.cache.changes import Resize
from worker.device import Device
from worker.engine.engine import EngineCore
from worker.engine.follower import _changed
from worker.engine.runner import ModelRunner, StorageError
from worker.layers.batch import Span
from worker.model_spec import ModelSpec
from worker.ranks.leader import RanksLost
from worker.ranks.messages import Change, Changed, Compute

PROMPTS = [list(range(5, 45)), list(range(9, 16)), list(range(5, 40))]
GREEDY = Sampling(temperature=0, max_tokens=12, ignore_eos=True)


def load(reference: Path | str, ranks: int, **options: Any) -> Engine:
    return Engine.load(str(reference), device="cpu", dtype="fp32", tensor_parallel=ranks, **options)


def followers(engine: Engine) -> list[int]:
    ranks = engine._core.runner.ranks
    assert ranks is not None
    return ranks.pids


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """An engine on several ranks, of the demo model unless another is given."""
    found: list[Engine] = []

    def begin(ranks: int = 2, reference: Path | str = "demo", **options: Any) -> Engine:
        found.append(load(reference, ranks, **options))
        return found[-1]

    yield begin
    for engine in found:
        engine.close()


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Engine, Engine]]:
    """The demo model on one rank and on two."""
    one, two = load("demo", 1), load("demo", 2)
    yield one, two
    two.close()
    one.close()


@pytest.mark.parametrize(
    ("family", "ranks"),
    [("qwen3", 2), ("llama", 4), ("gemma3_text", 2), ("gpt_oss", 2), ("mixtral", 4)],
)
def test_greedy_tokens_are_those_of_one_rank(
    family: str, ranks: int, tmp_path: Path, start: Callable[..., Engine]
) -> None:
    folder = make_checkpoint(tmp_path, family)
    whole = load(folder, 1).generate(PROMPTS, GREEDY)
    split = start(ranks, folder).generate(PROMPTS, GREEDY)
    assert [one.token_ids for one in split] == [one.token_ids for one in whole]


def test_what_the_leader_decides_is_as_with_one_rank(both: tuple[Engine, Engine]) -> None:
    """Draws with seeds, log-probabilities, scores, constrained answers and logits of prompts."""
    one, two = both
    drawn = Sampling(temperature=1.5, seed=7, n=3, max_tokens=8, ignore_eos=True, top_p=0.9)
    assert [found.token_ids for found in two.generate(PROMPTS, drawn)] == [
        found.token_ids for found in one.generate(PROMPTS, drawn)
    ]
    assert two.score(PROMPTS[0], PROMPTS[1]) == pytest.approx(
        one.score(PROMPTS[0], PROMPTS[1]), abs=1e-4
    )
    torch.testing.assert_close(
        two.prompt_logits(PROMPTS[0]), one.prompt_logits(PROMPTS[0]), rtol=1e-4, atol=1e-4
    )
    request = {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is 17 + 25?"}],
        "temperature": 0,
        "max_tokens": 20,
        "guided_regex": "[0-9]{3}",
    }
    assert two.chat(request).text == one.chat(request).text


def test_a_common_beginning_is_computed_once_and_changes_no_token(
    start: Callable[..., Engine],
) -> None:
    """Each rank keeps its part of the state, and gives it to later prompts."""
    engine = start(2)
    first = engine.generate([PROMPTS[0]], GREEDY)
    before = engine._core.prefix.cached_tokens
    again = engine.generate([PROMPTS[0]], GREEDY)
    assert engine._core.prefix.cached_tokens > before
    assert again[0].token_ids == first[0].token_ids


def test_preempted_sequences_have_the_tokens_of_one_rank(start: Callable[..., Engine]) -> None:
    """With so little cache that its storage grows, shrinks and is full."""
    one = load("demo", 1)
    sizes = one._core.book.sizes
    options = {"cache_bytes": sizes.storage(2, 64), "max_batch": 4}
    engine = start(2, **options)
    assert engine._core.book.sizes.storage(2, 64) == sizes.storage(2, 64)  # of both ranks
    expected = [found.token_ids for found in one.generate(PROMPTS, GREEDY)]
    assert [found.token_ids for found in engine.generate(PROMPTS, GREEDY)] == expected


def in_background(engine: Engine) -> tuple[threading.Thread, list[BaseException]]:
    """A thread that generates without end, and the error that ends it."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while True:
                engine.generate(PROMPTS, GREEDY)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    steps = engine._core.steps
    wait_until(lambda: errors or engine._core.steps > steps + 3)
    assert not errors
    return thread, errors


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_follower_that_is_killed_or_stopped_ends_the_step_and_the_group(
    number: signal.Signals, tmp_path: Path, start: Callable[..., Engine]
) -> None:
    engine = start(4, make_checkpoint(tmp_path, "qwen3"))
    pids = followers(engine)
    thread, errors = in_background(engine)
    os.kill(pids[1], number)
    thread.join(600)
    (error,) = errors
    assert isinstance(error, RanksLost)
    if number is signal.SIGKILL:
        assert "was killed by SIGKILL" in error.message
        assert f"rank 2 (process {pids[1]})" in error.message
    else:
        assert "did nothing for 5 s" in error.message
    assert all(map(has_ended, pids))
    with pytest.raises(RanksLost):
        engine.generate(PROMPTS, GREEDY)


def test_the_death_of_a_follower_is_noticed_without_work(start: Callable[..., Engine]) -> None:
    engine = start(2)
    os.kill(followers(engine)[0], signal.SIGKILL)
    wait_until(lambda: engine._core.runner.ranks._watch.lost)
    with pytest.raises(RanksLost, match="SIGKILL"):
        engine._core.step()


def test_a_follower_that_fails_says_why(start: Callable[..., Engine]) -> None:
    engine = start(2)
    ranks = engine._core.runner.ranks
    assert ranks is not None
    ranks.send(Compute((Span(0, 0, [10**6], 1),)))  # no token of the model
    with pytest.raises(RanksLost, match="IndexError: token 1000000 is beyond"):
        engine.generate(PROMPTS, GREEDY)
    assert all(map(has_ended, ranks.pids))


def test_an_error_of_the_leader_in_a_step_ends_the_group(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The followers are in the middle of a step then, and can't be brought back."""
    engine = start(2)

    def fail(*args: Any) -> None:
        raise MemoryError("no memory here")

    monkeypatch.setattr(type(engine._core.runner.model), "_hidden", fail)
    with pytest.raises(RanksLost, match="no memory here"):
        engine.generate(PROMPTS, GREEDY)
    assert all(map(has_ended, followers(engine)))


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


def test_ranks_listen_on_the_loopback_address_only(both: tuple[Engine, Engine]) -> None:
    for pid in (os.getpid(), *followers(both[1])):
        inodes = set()
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(os.readlink(descriptor))
        lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
        local = [line.split()[1] for line in lines if f"socket:[{line.split()[9]}]" in inodes]
        if pid != os.getpid():
            assert local
        assert all(address.startswith("0100007F:") for address in local)


def test_storage_that_a_follower_lacks_is_lacking_for_all(both: tuple[Engine, Engine]) -> None:
    class Lacking:
        """A follower without memory."""

        layers = ()

        def execute(self, change: Any) -> None:
            raise MemoryError("no memory there")

    resize = Resize(2, 64, 0)
    follower = ModelRunner.__new__(ModelRunner)
    follower.pool = Lacking()  # type: ignore[assignment]
    reply = _changed(follower, Change((resize,)))
    assert reply == Changed(resize, "no memory there")

    class Replying:
        """The ranks of a leader, one of which lacks memory."""

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


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel must be 1 to 64, got 0"),
        ({"tensor_parallel": 2, "draft": "ngram"}, "can't be used with draft"),
        ({"tensor_parallel": 2, "quantize": "q8"}, "can't be used with quantize"),
    ],
)
def test_options_that_ranks_do_not_have_are_refused(options: dict[str, Any], fact: str) -> None:
    with pytest.raises(InvalidRequest, match=fact):
        Engine.load("demo", device="cpu", **options)


def test_ranks_on_gpus_are_refused() -> None:
    device = Device(torch.device("cpu"))
    device.torch = torch.device("cuda", 0)
    with pytest.raises(InvalidRequest, match="tensor_parallel 2 is for device cpu at present"):
        EngineCore.load(ModelSpec(reference="demo", tensor_parallel=2), device=device)


def test_state_is_neither_saved_nor_loaded(both: tuple[Engine, Engine], tmp_path: Path) -> None:
    one, two = both
    path = tmp_path / "prompt.cache"
    with pytest.raises(JobError, match="state of a model on several ranks"):
        two.save_prompt_cache(PROMPTS[0], path)
    one.save_prompt_cache(PROMPTS[0], path)
    with pytest.raises(JobError, match="state of a model on several ranks"):
        two.load_prompt_cache(path)
    assert two.generate([PROMPTS[1]], GREEDY)  # it goes on
