"""A model on two GPUs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import Load
from tests.waiting import has_ended
from tests.worker.ranks.engines import GREEDY, PROMPTS, followers, in_background
from worker.ranks.leader import RanksLost

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "qwen3_next"])
def test_greedy_tokens_are_those_of_one_rank(
    family: str, load: Load, checkpoint: Callable[..., Path]
) -> None:
    """Each step starts its kernels one by one: several ranks have no CUDA graphs."""
    path = checkpoint(family)
    whole = load(path, reference=True).generate(PROMPTS, GREEDY)
    split = load(path, tensor_parallel=2).generate(PROMPTS, GREEDY)
    assert [one.token_ids for one in split] == [one.token_ids for one in whole]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_follower_that_is_killed_or_stopped_ends_the_step(
    number: signal.Signals, load: Load
) -> None:
    engine = load("demo", tensor_parallel=2)
    thread, errors = in_background(engine)
    os.kill(followers(engine)[0], number)
    thread.join(120)
    (error,) = errors
    assert isinstance(error, RanksLost)
    assert all(map(has_ended, followers(engine)))
