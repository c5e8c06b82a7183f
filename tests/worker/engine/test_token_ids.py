"""Token ids that callers give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jobs.errors import JobError
from worker.engine.token_ids import token_ids

VOCAB = 8


@pytest.mark.parametrize("values", [[1, "2"], [1.5], [True], None, 7])
def test_what_is_no_list_of_integers_is_refused(values: Any) -> None:
    with pytest.raises(JobError, match="prompt must be token ids: a list of integers"):
        token_ids(values, VOCAB, "prompt")


@pytest.mark.parametrize("bad", [-1, VOCAB])
def test_an_id_outside_the_vocabulary_is_refused(bad: int) -> None:
    with pytest.raises(
        JobError, match=f"the vocabulary has {VOCAB} tokens, got id {bad} in prompt"
    ):
        token_ids([0, bad], VOCAB, "prompt")


def test_integers_of_other_libraries_are_token_ids() -> None:
    assert token_ids([torch.tensor(3)], VOCAB, "prompt") == [3]  # type: ignore[list-item]
