"""Figures of requests that are served one beside the other."""

from __future__ import annotations

from collections.abc import Iterator

from bench.peers.closed_loop import Request, stepped, threaded
from bench.serving import Served, percentile

SERVED = Served(
    submitted=[0.0, 0.0, 2.0],
    arrivals=[[1.0, 2.0, 3.0, 4.0], [1.5, 3.0, 4.5, 6.0], [2.5, 3.5, 5.0, 7.0]],
)


def test_the_first_token_counts_from_the_submit_of_its_request() -> None:
    assert SERVED.first_token_seconds() == [1.0, 1.5, 0.5]


def test_decoding_is_measured_from_the_last_first_token_to_the_first_end() -> None:
    # 2.5 to 4.0 seconds: two tokens of the first request, one of each other.
    assert SERVED.decode_rate() == 4 / 1.5


def test_there_is_no_decode_rate_if_an_answer_ends_before_the_last_prompt_is_read() -> None:
    assert Served([0.0, 0.0], [[1.0, 2.0], [3.0, 4.0]]).decode_rate() is None


def test_a_run_ends_with_its_last_token() -> None:
    assert SERVED.seconds == 7.0


def test_a_percentile_is_one_of_the_figures() -> None:
    figures = [float(one) for one in range(20, 0, -1)]
    assert percentile(figures, 0.5) == 10.0
    assert percentile(figures, 0.95) == 19.0
    assert percentile([3.0], 0.95) == 3.0


class Engine:
    """Makes one token of each running request in a step."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.most = 0

    def add(self, index: int, prompt: list[int], tokens: int) -> None:
        self.left[index] = tokens

    def step(self) -> Iterator[tuple[int, int]]:
        self.most = max(self.most, len(self.left))
        for index in [*self.left]:
            self.left[index] -= 1
            if not self.left[index]:
                del self.left[index]
            yield index, 1


def test_a_stepped_engine_gets_all_requests_and_never_more_than_asked_for_at_once() -> None:
    engine = Engine()
    requests: list[Request] = [([1], 3), ([1], 1), ([1], 2), ([1], 4), ([1], 1)]
    reply = stepped(requests, 2, engine.add, engine.step)
    assert [len(times) for times in reply["arrivals"]] == [3, 1, 2, 4, 1]
    assert engine.most == 2
    third, second = reply["submitted"][2], reply["arrivals"][1]
    assert third >= second[-1]


def test_clients_on_threads_take_the_next_request_when_theirs_has_ended() -> None:
    requests: list[Request] = [([index], index % 3 + 1) for index in range(20)]
    reply = threaded(requests, 4, lambda prompt, count: range(count))
    assert [len(times) for times in reply["arrivals"]] == [count for _, count in requests]
