"""The mix of requests of bench.traffic, and its figures; the traffic of bench.gpu."""

from __future__ import annotations

from statistics import median

from bench.gpu import TURNS
from bench.gpu_traffic import Traffic
from bench.serving import Served
from bench.traffic import figures, traffic


def test_the_mix_is_the_same_for_all_contestants_and_another_in_each_round() -> None:
    assert traffic(32, seed=0) == traffic(32, seed=0)
    assert traffic(32, seed=0) != traffic(32, seed=1)


def test_lengths_are_within_their_bounds_and_around_their_medians() -> None:
    mix = traffic(2000, seed=0)
    prompts, answers = [len(prompt) for prompt, _ in mix], [tokens for _, tokens in mix]
    assert (min(prompts) >= 20, max(prompts) <= 1000) == (True, True)
    assert (min(answers) >= 10, max(answers) <= 400) == (True, True)
    assert 120 < median(prompts) < 180
    assert 80 < median(answers) < 140
    assert max(prompts) > 900  # the tail is there


def test_rates_are_those_of_the_whole_run() -> None:
    served = Served([0.0, 1.0], [[0.5, 2.0], [2.0, 4.0]])
    found = figures([([1] * 30, 6), ([1] * 10, 4)], served, 3 << 20)
    assert found["answer tokens/s"] == 10 / 4.0
    assert found["all tokens/s"] == 50 / 4.0
    assert (found["first token p50 s"], found["p95 s"]) == (0.5, 1.0)
    assert found["peak RSS MiB"] == 3.0


def test_the_traffic_on_gpus_makes_as_many_tokens_as_its_page_says() -> None:
    turns = [Traffic.random(turn, tiny=False) for turn in TURNS]
    assert [sum(turn.lengths) for turn in turns] == [144_611, 146_708]
