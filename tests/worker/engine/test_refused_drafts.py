"""Which drafts are refused, before weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.errors import JobError
from tests.worker.checkpoints import make_checkpoint
from worker import Engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "target", num_hidden_layers=2)


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("worker.loading.load.weights.load")


def refused(folder: Path, **options: Any) -> str:
    with pytest.raises(JobError) as caught:
        Engine.load(str(folder), device="cpu", dtype="fp32", **options)
    assert caught.value.code == "invalid_request"
    return caught.value.message


def test_a_draft_that_is_larger_than_the_model_is_refused(folder: Path) -> None:
    larger = make_checkpoint(folder.parent / "larger", num_hidden_layers=4)
    assert "use a draft that is smaller than the model" in refused(folder, draft=str(larger))


def test_a_draft_with_another_vocabulary_is_refused(folder: Path) -> None:
    other = make_checkpoint(folder.parent / "other", num_hidden_layers=1)
    path = other / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = [name for name in vocab if len(name) == 1][:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(tokenizer))
    message = refused(folder, draft=str(other))
    assert "another vocabulary" in message and f"is {second!r} in the draft" in message


def test_a_draft_with_other_special_tokens_is_refused(folder: Path) -> None:
    other = make_checkpoint(folder.parent / "special", num_hidden_layers=1)
    path = other / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    entry = next(one for one in tokenizer["added_tokens"] if one["special"])
    entry["special"] = False
    path.write_text(json.dumps(tokenizer))
    message = refused(folder, draft=str(other))
    assert f"id {entry['id']}" in message and "special token of the model only" in message


def test_numbers_of_tokens_that_cannot_work_are_refused(folder: Path) -> None:
    assert "1 to 32" in refused(folder, draft="ngram", draft_tokens=0)
    assert "needs a draft" in refused(folder, draft_tokens=3)


def test_drafts_as_long_as_the_smallest_window_are_refused(folder: Path, tmp_path: Path) -> None:
    wide, narrow, one = (
        make_checkpoint(tmp_path / str(window), "gemma3_text", sliding_window=window)
        for window in (8, 6, 1)
    )
    assert "window is 8: use at most 7" in refused(wide, draft="ngram", draft_tokens=8)
    assert "use at most 5" in refused(wide, draft=str(narrow), draft_tokens=7)
    assert "use at most 5" in refused(narrow, draft=str(wide), draft_tokens=7)
    assert "use at most 7" in refused(folder, draft=str(wide), draft_tokens=8)
    assert "window is 1: use no draft" in refused(one, draft="ngram", draft_tokens=1)


@pytest.mark.parametrize("tokens", ["4", 2.5, True])
def test_the_length_of_a_draft_is_an_integer(path: Path, tokens: Any) -> None:
    with pytest.raises(JobError, match="draft_tokens must be 1 to 32"):
        Engine.load(str(path), device="cpu", draft="ngram", draft_tokens=tokens)


def test_a_draft_that_is_not_found_is_named_as_the_draft(path: Path) -> None:
    with pytest.raises(JobError, match=r"draft 'ngrm': .*; 'ngram' needs no model") as caught:
        Engine.load(str(path), device="cpu", draft="ngrm")
    assert caught.value.param == "draft"
