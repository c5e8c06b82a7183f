"""Which slots hold copies of the same blocks, and what attention makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.api.sampling import Sampling
from tests.worker.checkpoints import make_checkpoint
from worker import Engine
from worker.cache.changes import Share
from worker.cache.prefix_store import BLOCK, Block
from worker.cache.shared_columns import SharedColumns
from worker.layers.batch import Batch


class Nothing:
    nbytes = 0


def blocks(count: int, length: int = BLOCK) -> list[Block[Nothing]]:
    return [Block(b"", length, Nothing()) for _ in range(count)]


class Watched(SharedColumns):
    """Keeps what it emits."""

    def __init__(self, slots: int) -> None:
        self.emitted: list[Share] = []
        super().__init__(slots, self.emitted.append)


def found(shared: Watched) -> list[tuple[int, int]]:
    shared.update()
    return [*shared.emitted[-1].rows]


def test_slots_read_from_the_lowest_one_with_the_same_blocks() -> None:
    shared, begin = Watched(5), blocks(3)
    shared.hold(1, begin)
    shared.hold(3, [*begin[:2], *blocks(2)])
    shared.hold(4, [*begin, *blocks(1)])
    assert found(shared) == [(0, 0), (1, 0), (0, 0), (1, 2 * BLOCK), (1, 3 * BLOCK)]


def test_the_deepest_branch_counts() -> None:
    shared, begin, branch = Watched(4), blocks(1), blocks(2)
    for slot, tail in enumerate((blocks(2), branch, [*branch, *blocks(1)], [])):
        shared.hold(slot, [*begin, *tail])
    assert found(shared) == [(0, 0), (0, BLOCK), (1, 3 * BLOCK), (0, BLOCK)]


def test_a_block_after_others_is_not_the_same() -> None:
    """A block outlives the one before it, which was computed again."""
    shared, (last,) = Watched(2), blocks(1)
    shared.hold(0, [*blocks(1), last])
    shared.hold(1, [*blocks(1), last])
    assert found(shared) == [(0, 0), (1, 0)]


def test_a_shorter_block_is_left_out() -> None:
    shared, begin = Watched(2), [*blocks(1), *blocks(1, length=5)]
    shared.hold(0, begin)
    shared.hold(1, begin)
    assert found(shared)[1] == (0, BLOCK)


def test_a_slot_holds_what_was_copied_from_it() -> None:
    shared, known, new = Watched(3), blocks(1), blocks(2)
    shared.extend(0, [], known)
    shared.extend(0, known, new)
    shared.hold(2, [*known, *new])
    assert found(shared)[2] == (0, 3 * BLOCK)


def test_a_slot_does_not_hold_what_it_computed_beside_a_block() -> None:
    shared, known, new = Watched(3), blocks(1), blocks(1)
    shared.hold(0, known)
    for slot in (1, 2):
        shared.extend(slot, known, new)
    assert found(shared) == [(0, 0), (1, 0), (2, 0)]


def test_nothing_is_read_from_a_slot_that_was_released() -> None:
    shared, begin = Watched(3), blocks(2)
    for slot in range(3):
        shared.hold(slot, begin)
    assert found(shared)[2] == (0, 2 * BLOCK)
    shared.release(0)
    assert (
        shared.emitted[-1].rows == ()
    )  # a model that is called before the next update reads its own
    assert found(shared) == [(0, 0), (1, 0), (1, 2 * BLOCK)]


def test_scores_between_steps_do_not_read_what_other_slots_hold(tmp_path: Path) -> None:
    """The slot of a sequence that ended had a beginning in common with one that runs."""
    engine = Engine.load(str(make_checkpoint(tmp_path)), max_batch=3, dtype="fp32")
    expected = engine.score([7, 8, 9], [10, 11])
    begin = [5 + at % 90 for at in range(50)]
    first, second = (
        engine.generate_stream(
            [*begin, one], Sampling(temperature=0, max_tokens=tokens, ignore_eos=True)
        )
        for one, tokens in ((7, 20), (8, 3))
    )
    next(first)
    assert len([*second]) == 3
    assert engine.score([7, 8, 9], [10, 11]) == expected


def test_rows_with_a_common_beginning_read_it_from_one_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the first one has ended."""
    engine = Engine.load(str(make_checkpoint(tmp_path)), max_batch=3, dtype="fp32")
    begin = [5 + at % 90 for at in range(50)]
    prompts = [[*begin, 7 + row] for row in range(3)]
    core, tables = engine._core, []
    model: Any = core.runner.model

    def watched(batch: Batch, caches: Any) -> torch.Tensor:
        tables.append(core.runner.pool.shared[:3].tolist())
        logits: torch.Tensor = model(batch, caches)
        return logits

    monkeypatch.setattr(core.runner, "model", watched)
    engine.generate(prompts, Sampling(temperature=0, max_tokens=8, ignore_eos=True))
    common = 50 // BLOCK * BLOCK
    assert [[0, 0], [0, common], [0, common]] in tables
    assert tables[-1] == [[0, 0], [1, 0], [1, common]]
