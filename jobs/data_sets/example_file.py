"""Reads the examples of a run from a file of rows with their targets."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

from jobs.api.message import Message
from jobs.api.request import ChatRequest
from jobs.data_sets.conventions import first_row, with_conventions
from jobs.data_sets.data_set import DataSet
from jobs.data_sets.few_shot import Example, Examples
from jobs.data_sets.requests import Overrides
from jobs.data_sets.row_templates import RowTemplate
from jobs.data_sets.source import ErrorRow
from jobs.errors import InvalidRequest, invalid


def read_examples(
    file: Path,
    count: int,
    by: str | None,
    overrides: Overrides,
    template: RowTemplate | None,
) -> Examples:
    """The examples of --few-shot: the first `count` rows and one more, which replaces one of them
    before itself; so many for each value of the column `by`. `overrides`: as given, without the
    conventions of the data set. Raises InvalidRequest."""
    plain = replace(overrides, names={}, keep=())
    names = {old: new for old, new in overrides.names.items() if old in first_row([file], {})}
    overrides = with_conventions(replace(plain, names=names), [file])
    groups: dict[str, list[Example]] = {}
    with DataSet([file], overrides, template=template) as source:
        content, _ = source.content()
        try:
            chosen = source.first_of_groups(by, count + 1)
        except InvalidRequest as error:
            raise invalid(f"{file}: {error.message}", "few_shot") from None
        rows = islice(source.read(chosen.__contains__), max(chosen, default=-1) + 1)
        for row in rows:
            if row is None:
                continue
            where = f"{file}: {row.place}"
            if isinstance(row, ErrorRow):
                raise invalid(f"{where}: {row.error.message}", "few_shot")
            assert isinstance(row.request, ChatRequest)
            target = row.request.job.target
            if target is None:
                raise invalid(f"{where}: an example has no target, its answer", "few_shot")
            answer = Message(role="assistant", content=target)
            groups.setdefault(chosen[row.number], []).append(Example(row.request.messages, answer))
    examples = Examples(str(file), groups, count, content, by)
    if by is None:
        examples.of(None)  # which all rows have
    return examples
