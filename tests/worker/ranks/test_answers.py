"""The answers of engines on several ranks, beside those of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from jobs.api.sampling import Sampling
from tests.worker.checkpoints import make_checkpoint
from tests.worker.ranks.engines import GREEDY, PROMPTS, load
from worker import ChatSession, Engine


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("qwen3", 2),
        ("llama", 4),
        ("gemma3_text", 2),
        ("gpt_oss", 2),
        ("mixtral", 4),
        ("qwen3_next", 4),
    ],
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


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_next"])
def test_a_common_beginning_is_computed_once_and_changes_no_token(
    family: str, tmp_path: Path, start: Callable[..., Engine]
) -> None:
    """Each rank keeps its part of the state, and gives it to later prompts."""
    folder = make_checkpoint(tmp_path, family)
    prompts = [[*range(5, 95)], [*range(5, 90), 7, 8, 9]]
    expected = [one.token_ids for one in load(folder, 1).generate(prompts, GREEDY)]
    engine = start(2, folder)
    found = [engine.generate([prompt], GREEDY)[0].token_ids for prompt in (*prompts, prompts[0])]
    assert engine._core.prefix.cached_tokens > 64
    assert found == [*expected, expected[0]]


def test_a_conversation_has_the_answers_of_one_rank_and_computes_new_messages_only(
    both: tuple[Engine, Engine],
) -> None:
    answers = []
    before = both[1]._core.prefix.cached_tokens
    for engine in both:
        session = ChatSession(engine, system="Be brief.", temperature=0, max_tokens=12)
        answers.append([session.respond(text).text for text in ("What is 17 + 25?", "And 3 + 4?")])
    assert answers[0] == answers[1]
    assert both[1]._core.prefix.cached_tokens > before


def test_preempted_sequences_have_the_tokens_of_one_rank(start: Callable[..., Engine]) -> None:
    """With so little cache that its storage grows, shrinks and is full."""
    one = load("demo", 1)
    sizes = one._core.book.sizes
    options = {"cache_bytes": sizes.sequence(128), "max_batch": 4}
    engine = start(2, **options)
    assert engine._core.book.sizes.sequence(128) == sizes.sequence(128)  # of both ranks
    expected = [found.token_ids for found in one.generate(PROMPTS, GREEDY)]
    assert [found.token_ids for found in engine.generate(PROMPTS, GREEDY)] == expected


def test_forced_tokens_are_computed_together_on_all_ranks(both: tuple[Engine, Engine]) -> None:
    one, two = both
    request = {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is 17 + 25?"}],
        "temperature": 0,
        "max_tokens": 60,
        "guided_regex": "[0-9]{3} is the number that you have asked for[.!]",
    }
    before = two._core.steps
    found = two.chat(request)
    steps = two._core.steps - before
    assert found.text == one.chat(request).text
    assert found.usage is not None and steps < found.usage.completion_tokens


def test_looked_up_drafts_change_no_token(tmp_path: Path, start: Callable[..., Engine]) -> None:
    """The leader alone proposes and accepts. Followers take wrong tokens back, also out of the
    windows of their caches."""
    folder = make_checkpoint(tmp_path, "gemma3_text")
    prompts = [[7, 8] * 15, *PROMPTS]
    sampling = Sampling(temperature=0, max_tokens=40, ignore_eos=True)
    expected = load(folder, 1, max_batch=1).generate(prompts, sampling)
    engine = start(2, folder, max_batch=1, draft="ngram")
    found = engine.generate(prompts, sampling)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    speculation = engine._core.speculation
    assert 0 < speculation.accepted_tokens < speculation.drafted_tokens
