"""Scores of items, in this process."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from jobs.api.score_request import ScoreRequest
from jobs.api.score_result import ScoredItem, ScoreResult
from worker import Engine
from worker.backend import Outcome
from worker.local.collect import CollectingSink
from worker.scoring.generation import Scoring, start_scoring


def request(*items: Any, **fields: Any) -> ScoreRequest:
    return ScoreRequest(model="m", items=items, **fields)


def start(engine: Engine, *items: Any, **fields: Any) -> tuple[Scoring, CollectingSink]:
    sink = CollectingSink()
    return started(start_scoring(engine._core, request(*items, **fields), sink)), sink


def started(parts: Generator[None, None, Scoring]) -> Scoring:
    """The scoring after all parts of its preparation."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            scoring: Scoring = end.value
            return scoring


def score_result(engine: Engine, *items: Any, **fields: Any) -> ScoreResult:
    """The result of a job that has finished."""
    outcome = outcome_of(engine, *items, **fields)
    assert isinstance(outcome.result, ScoreResult), outcome.error
    return outcome.result


def outcome_of(engine: Engine, *items: Any, **fields: Any) -> Outcome:
    scoring, sink = start(engine, *items, **fields)
    while not scoring.done:
        engine.step()
    found = sink.outcome
    assert found is not None
    return found


def score(engine: Engine, *items: Any, **fields: Any) -> list[ScoredItem]:
    """The results of items in a job that has finished."""
    return score_result(engine, *items, **fields).items
