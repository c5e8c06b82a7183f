"""The places of a step's tokens in its batch."""

from __future__ import annotations

import pytest
import torch

from worker.layers.batch import SHORT, Batch, Following, Span

CPU = torch.device("cpu")
LONG = [5] * (SHORT + 1)


@pytest.mark.parametrize(
    ("logits", "rows"), [((0, 0), []), ((1, 1), [0, 3]), ((1, 2), [0, 2, 3]), ((1, 3), None)]
)
def test_rows_that_need_logits(logits: tuple[int, int], rows: list[int] | None) -> None:
    spans = [Span(0, 7, [1], 3, logits[0]), Span(1, 0, [2, 3, 4], 3, logits[1])]
    batch = Batch.prepare(spans, CPU)[0]
    found = batch.logits_rows
    assert (None if found is None else found.tolist()) == rows
    assert len(batch.select_logits_rows(batch.token_ids)) == (4 if rows is None else len(rows))


@pytest.mark.parametrize("wanted", [0, 1])
@pytest.mark.parametrize("ids", [[[1]], [[1], [2, 3]], [[2, 3], [4], LONG], [LONG]])
def test_a_clone_is_equal_and_has_memory_of_its_own(ids: list[list[int]], wanted: int) -> None:
    spans = [Span(slot, 9, tokens, 9, wanted) for slot, tokens in enumerate(ids)]
    batch = Batch.prepare(spans, CPU)[0]
    clone = batch.clone()

    def tensors(one: Batch) -> list[torch.Tensor]:
        groups = [group for group in (one.decode, one.short) if group is not None]
        found = [one.token_ids, one.positions, one.prompt_lengths]
        found += [tensor for group in groups for tensor in (group.slots, group.positions)]
        return found if one.logits_rows is None else [*found, one.logits_rows]

    expected = [tensor.tolist() for tensor in tensors(batch)]
    assert [tensor.tolist() for tensor in tensors(clone)] == expected
    assert batch.packed is not None
    batch.packed.zero_()
    assert [tensor.tolist() for tensor in tensors(clone)] == expected
    assert not any(any(tensor.tolist()) for tensor in tensors(batch)), "views of `packed`"


def test_a_group_of_no_sequence_takes_the_rows_of_others() -> None:
    """As the inputs of a graph with more rows than a step."""
    group = Batch.of_no_sequence(4, CPU)
    assert group.decode is not None and group.decode.slots.tolist() == [-1] * 4
    first, _ = Batch.prepare([Span(2, 5, [7], 6), Span(0, 1, [9], 2), Span(3, 8, [4], 9)], CPU)
    group.take(first)
    assert group.token_ids.tolist() == [9, 7, 4, 0]
    assert (group.positions.tolist(), group.decode.slots.tolist()) == ([1, 5, 8, 0], [0, 2, 3, -1])
    second, _ = Batch.prepare([Span(1, 3, [6], 4)], CPU)
    group.take(second)
    first_row = (group.token_ids[0], group.positions[0], group.prompt_lengths[0])
    assert [int(one) for one in first_row] == [6, 3, 4]
    assert group.decode.slots.tolist() == [1, -1, -1, -1]


def test_chunks_are_cut_into_pieces() -> None:
    spans = [Span(0, 3, [1], 4), Span(3, 0, [1] * 5, 5), Span(1, 7, [1] * 20, 27)]
    batch, _ = Batch.prepare(spans, CPU)
    pieces = batch.pieces(8)
    assert pieces.table.tolist() == [[1, 5, 3, 0], [6, 8, 1, 7], [14, 8, 1, 15], [22, 4, 1, 23]]
    assert (pieces.high, pieces.longest) == (4, 27)
    assert batch.pieces(8) is pieces
    assert batch.clone().pieces(8) is not pieces


@pytest.mark.parametrize("rows", [(0, 1, 2), (0, 2), (1,)])
def test_a_step_advances_to_the_batch_of_the_tokens_that_it_draws(rows: tuple[int, ...]) -> None:
    starts, drawn = {1: 5, 2: 9, 4: 3}, [50, 60, 70]
    spans = [Span(slot, start, [7], 3) for slot, start in starts.items()]
    batch = Batch.lay_out(spans, CPU)
    later = [Span(spans[row].slot, spans[row].start + 1, [drawn[row]], 3) for row in rows]
    expected = Batch.lay_out(later, CPU)
    low, high = later[0].slot, later[-1].slot + 1
    following = Following(rows, low, high, max(span.end for span in later))
    found = batch.advanced(torch.tensor(drawn), following)
    assert found.packed is not None and expected.packed is not None
    assert found.packed.tolist() == expected.packed.tolist()
    assert found.decode is not None and expected.decode is not None
    for name in ("size", "low", "high", "longest", "dense"):
        assert getattr(found.decode, name) == getattr(expected.decode, name)
    assert found.decode.slots.tolist() == expected.decode.slots.tolist()
    assert (found.longest, found.shape) == (expected.longest, expected.shape)
    again = Batch.lay_out(spans, CPU)
    assert batch.packed is not None and again.packed is not None
    assert batch.packed.tolist() == again.packed.tolist()
