"""Where snapshots of a prompt are taken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.cache.prefix_store import BLOCK
from worker.cache.snapshot_points import SnapshotPoints, spaced_points

FIRST = 256


def test_a_new_prompt_has_points_at_growing_distances_and_at_its_end() -> None:
    points = SnapshotPoints.plan(0, 4000, [0], grid=BLOCK, spacing=FIRST)
    assert points.ends == [256, 512, 1024, 2048, 4000]
    assert points.provisional == {256, 512, 1024, 2048}


def test_beyond_the_places_where_prompts_part_none_is_close() -> None:
    points = SnapshotPoints.plan(400, 4000, [400, 970], grid=BLOCK, spacing=FIRST)
    assert points.ends == [960, 2048, 4000]
    assert points.provisional == {2048}


def test_a_prompt_that_ends_soon_after_is_not_cut() -> None:
    assert SnapshotPoints.plan(0, 368, [0], grid=BLOCK, spacing=FIRST).ends == [368]
    assert SnapshotPoints.plan(0, 384, [0], grid=BLOCK, spacing=FIRST).ends == [256, 384]


def test_nothing_is_planned_before_the_kept_beginning() -> None:
    assert SnapshotPoints.plan(400, 384, [400], grid=BLOCK, spacing=FIRST).ends == []


@given(first=st.sampled_from([16, 64, 256]), last=st.integers(0, 40_000), data=st.data())
def test_some_point_is_in_the_second_half_of_each_common_beginning(
    first: int, last: int, data: st.DataObject
) -> None:
    points = [*spaced_points(0, last, first)]
    assert len(points) <= max(1, last // first).bit_length()
    assert all(point % first == 0 for point in points)
    if last >= 2 * first:
        common = data.draw(st.integers(first, last - first // 2))
        assert any(common < 2 * point <= 2 * common for point in points)


@given(st.sets(st.integers(1, 99)), st.integers(0, 99))
def test_points_around_a_place(ends: set[int], place: int) -> None:
    points = SnapshotPoints(sorted(ends))
    assert points.after(place) == min((end for end in ends if end > place), default=None)
    assert points.until(place) == max((end for end in ends if end <= place), default=0)
