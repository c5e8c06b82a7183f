"""prompt_logprobs: of every token of the prompt, in any chunks, and in vLLM's form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jobs import ChatCompletion, ChatRequest
from jobs.errors import InvalidRequest
from worker import Engine
from worker.sampling.prompt_logits import PromptLogprobs, TokenScore, WantedRows, score_tokens


def asking(text: str = "one two three four five", **fields: object) -> ChatRequest:
    given = {"prompt_logprobs": 3, "max_tokens": 4, "temperature": 0, **fields}
    return ChatRequest.parse(
        {"model": "m", "messages": [{"role": "user", "content": text}], "stream": False, **given}
    )


def expected(engine: Engine, request: ChatRequest) -> tuple[list[int], Tensor]:
    """The prompt, and the log-probabilities after each of its tokens."""
    ids = engine.prompt_ids(request)
    return ids, engine.prompt_logits(ids).log_softmax(-1)


def check(completion: ChatCompletion, ids: list[int], rows: Tensor, top: int) -> None:
    scored = completion.prompt_logprobs
    assert scored is not None
    assert scored[0] is None
    assert len(scored) == len(ids)
    for position, scores in enumerate(scored[1:], 1):
        assert scores is not None
        row = rows[position - 1]
        own = scores[str(ids[position])]
        assert own.logprob == pytest.approx(float(row[ids[position]]), abs=1e-4)
        assert own.rank == 1 + int((row > row[ids[position]]).sum())
        best = row.topk(top).indices.tolist()
        assert set(scores) == {str(token) for token in [*best, ids[position]]}
        for place, token in enumerate(best, 1):
            assert scores[str(token)].rank == place


@pytest.mark.parametrize("top", [0, 1, 3])
def test_each_token_has_its_logprob_and_rank(engine: Engine, top: int) -> None:
    request = asking(prompt_logprobs=top)
    check(engine.chat(request), *expected(engine, request), top)


def test_chunks_and_further_choices_change_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = asking("six " * 30, n=3, max_tokens=12)
    wanted = expected(engine, request)
    monkeypatch.setattr("worker.engine.sequence.CHUNK_TOKENS", 5)
    check(engine.chat(request), *wanted, 3)


def test_without_the_field_there_are_none(engine: Engine) -> None:
    done = engine.chat(asking(prompt_logprobs=None))
    assert done.prompt_logprobs is None
    assert "prompt_logprobs" not in done.to_dict()


def test_the_entries_have_the_form_of_vllm(engine: Engine) -> None:
    data = engine.chat(asking(prompt_logprobs=1)).to_dict()["prompt_logprobs"]
    assert data[0] is None
    for entry in data[1:]:
        for token, score in entry.items():
            assert token.isdigit()
            assert set(score) == {"logprob", "rank", "decoded_token"}
    assert ChatCompletion.model_validate_json(engine.chat(asking()).to_json())


def test_they_are_refused_with_stream() -> None:
    with pytest.raises(InvalidRequest, match="prompt_logprobs: they are not streamed"):
        asking(stream=True)


def test_a_prompt_that_is_computed_again_is_scored_once() -> None:
    scores = PromptLogprobs([0, 1, 2, 3], top=1)
    logits = torch.eye(4)

    def add(end: int) -> None:
        (found,) = score_tokens(logits, [(scores.row, scores.wanted(end))])
        assert found is not None
        scores.add(found)

    assert scores.wants(0, 2)
    add(2)
    assert len(scores.positions) == 2
    assert not scores.wants(0, 2)
    add(3)
    assert len(scores.positions) == 3
    assert not scores.wants(3, 1)
    value = float(logits[0].log_softmax(0)[1])
    assert scores.positions[0][0] == TokenScore(1, pytest.approx(value), 2)  # type: ignore[arg-type]


def test_prompts_of_one_step_are_scored_together() -> None:
    logits = torch.randn(9, 30)
    logits[4] = torch.nan
    asked = [(0, WantedRows(2, [3, 4], 2)), (3, WantedRows(2, [1, 1], 0)), (6, WantedRows(1, [9]))]
    first, bad, last = score_tokens(logits, asked)
    assert [score_tokens(logits, [one])[0] for one in asked] == [first, bad, last]
    assert first is not None and [len(one) for one in first] in ([3, 3], [2, 3], [3, 2], [2, 2])
    assert bad is None
    assert last is not None and [one[0].token_id for one in last] == [9]


def test_logits_that_are_not_finite_have_no_scores() -> None:
    assert score_tokens(torch.full((1, 4), torch.nan), [(0, WantedRows(1, [1], 1))]) == [None]
