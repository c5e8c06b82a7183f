"""Rows of a file → requests that score one item, for the modes of `chatjobs run` that generate
nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from jobs.api.score_request import ITEM_TYPES, ScoreItem, ScoreRequest, parse_item
from jobs.api.wire import describe
from jobs.data_sets.id_index import IdIndex
from jobs.data_sets.requests import (
    OVERHEAD,
    InvalidLine,
    Overrides,
    check_custom_id,
    check_numbers,
    check_size,
    in_terms_of_file,
    is_kept,
    mapping_of,
    target_text,
    text_of,
    with_kept,
    without_model,
)
from jobs.errors import InvalidRequest, invalid

# The columns that each mode reads, beside those of all.
COLUMNS = {
    "loglikelihood": ("messages", "prompt", "continuations", "continuation"),
    "choice": ("messages", "prompt", "choices"),
    "perplexity": ("text",),
}
OF_ALL = ("model", "custom_id", "target", "task", "metadata")
NAMED_CHOICES = {"text", "label"}  # keys of an object of choices and their names


@dataclass(frozen=True, slots=True)
class ItemLine:
    """A valid row."""

    number: int
    request: ScoreRequest
    size: int  # bytes, as JSON


def row_fields(mode: str) -> tuple[str, ...]:
    """The columns of a row that a mode reads."""
    return (*COLUMNS[mode], *OF_ALL)


def option_fields(mode: str) -> tuple[str, ...]:
    """The fields that `-o` sets in a mode: of all requests, and of all items."""
    of_items = set(ITEM_TYPES[mode].model_fields) - set(ScoreItem.model_fields) - {"type"}
    of_request = set(ScoreRequest.model_fields) - {"items", "job"}
    return tuple(sorted((of_items | of_request) - set(row_fields(mode))))


class ItemReader:
    """Makes requests of the rows of a file, as `RequestReader` makes chats."""

    def __init__(self, overrides: Overrides, ids: IdIndex | None, part: str = "field") -> None:
        self._overrides, self._ids, self._part = overrides, ids, part
        self._mode = overrides.mode
        self._known = row_fields(overrides.mode)
        options = overrides.fields
        of_request = ScoreRequest.model_fields
        self._of_items = {name: one for name, one in options.items() if name not in of_request}
        self._of_request = {name: one for name, one in options.items() if name in of_request}
        self._requests: dict[Any, ScoreRequest] = {}  # without items, by model

    def read(
        self, index: int | None, place: str, number: int, data: dict[str, Any] | InvalidRequest
    ) -> ItemLine | InvalidLine:
        """The request of a row, or its error. `index`: of the row, from 0; None: it has none.
        `place`: for people."""
        try:
            if isinstance(data, InvalidRequest):
                raise data
            item = parse_item({**self._fields(data), "row": index}).to_dict()
            if "custom_id" in item:
                check_custom_id(self._ids, self._overrides.run, item["custom_id"], place)
            request = self._request_of(data).model_copy(update={"items": [item]})
            size = len(json.dumps(item))
            check_size(size + OVERHEAD)
        except InvalidRequest as error:
            given = {} if isinstance(data, InvalidRequest) else data
            return InvalidLine(number, in_terms_of_file(error, self._origins(given)))
        return ItemLine(number, request, size)

    def skip(self, place: str, data: dict[str, Any] | InvalidRequest) -> None:
        """Keep the custom_id of a row that need not be read, or is invalid."""
        custom_id = None if isinstance(data, InvalidRequest) else text_of(data.get("custom_id"))
        if self._ids is not None and isinstance(custom_id, str):
            self._ids.add("custom_id", f"{self._overrides.run}/{custom_id}", place)

    def _fields(self, data: dict[str, Any]) -> dict[str, Any]:
        """The fields of the item of a row."""
        if "body" in data:
            mode = self._overrides.option_names.mode("chat")
            raise invalid(f"a line of an OpenAI batch file is a chat: run it with {mode}")
        check_numbers(data)
        keep = self._overrides.keep
        kept = {name: one for name, one in data.items() if is_kept(name, self._known, keep)}
        row = {name: data[name] for name in self._known if name in data and name not in kept}
        fields: dict[str, Any] = {"type": self._mode, **self._of_items}
        for name, text in (("custom_id", text_of), ("target", target_text)):
            if row.get(name) is not None:
                fields[name] = text(row[name])
        if row.get("task") is not None:
            kept["task"] = row["task"]  # as of a chat
        metadata = with_kept(mapping_of(row, "metadata") if row.get("metadata") else {}, kept)
        if metadata:
            fields["metadata"] = metadata
        if self._mode == "perplexity":
            return {**fields, "text": row[self._given(row, "text")]}
        name = self._given(row, "prompt", "messages")
        prompt = fields[name] = row[name]
        if self._mode == "loglikelihood":
            column = self._given(row, "continuations", "continuation", "target")
            texts = [(target_text if column == "target" else text_of)(row[column])]
            if column == "continuations":
                texts = _list_of(row[column], column)
            return {**fields, **self._behind("continuations", prompt, texts)}
        texts, labels = _named_choices(row[self._given(row, "choices")])
        if "target" in fields:
            right = _right_choice(row["target"], texts, labels)
            fields["target"] = texts[right] if isinstance(texts[right], str) else str(right)
        return {**fields, **self._behind("choices", prompt, texts)}

    def _given(self, row: Mapping[str, Any], *names: str) -> str:
        """The first of some columns that the row has. Raises InvalidRequest if it has none."""
        found = next((name for name in names if row.get(name) is not None), None)
        if found is not None:
            return found
        columns = ", ".join(map(repr, row)) or "none"
        options = self._overrides.option_names
        raise invalid(
            f"a row of {options.mode(self._mode)} needs {' or '.join(names)}; of the columns that "
            f"are read, this one has {columns} ({options.map('COLUMN', names[0])} names another "
            "column)",
            names[0],
        )

    def _behind(self, name: str, prompt: Any, texts: list[Any]) -> dict[str, Any]:
        """The fields of an item with its continuations, of this name, and what separates them from
        their prompt."""
        delimiter = self._overrides.delimiter
        if not isinstance(prompt, str) or not prompt:
            return {name: texts}

        def behind(text: str) -> str:
            has_space = prompt[-1].isspace() or text[:1].isspace()
            default = "" if has_space else " "
            return f"{default if delimiter is None else delimiter}{text}"

        separated = [behind(one) if isinstance(one, str) and one else one for one in texts]
        if separated == texts:
            return {name: texts}
        return {name: separated, "delimiter": " " if delimiter is None else delimiter}

    def _request_of(self, data: Mapping[str, Any]) -> ScoreRequest:
        """The request of a row, without its item."""
        model = data.get("model") if self._overrides.model is None else self._overrides.model
        if model is None:
            raise without_model(self._part)
        known = self._requests.get(model) if isinstance(model, str) else None
        if known is not None:
            return known
        job = {"run": self._overrides.run, "priority": "bulk"}
        found = ScoreRequest.parse({**self._of_request, "model": model, "items": [{}], "job": job})
        self._requests[model] = found
        return found

    def _origins(self, data: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
        """Paths in the item, with the options or columns that they are from."""
        for name in self._overrides.fields:
            yield name, name, self._overrides.option_names.option(name)
        columns = {new: old for old, new in self._overrides.names.items()}
        for name in data:
            column = columns.get(name, name)
            yield name, column, f"{self._part} {column!r}"


def known_fields(overrides: Overrides, custom_id: str | None) -> dict[str, Any]:
    """The fields of the request of an invalid row that are known."""
    item = {"type": overrides.mode, **({"custom_id": custom_id} if custom_id else {})}
    return {"model": overrides.model, "items": [item]}


def _list_of(value: Any, name: str) -> list[Any]:
    """Several texts, or their JSON, as in a cell of CSV. Numbers become texts. Raises
    InvalidRequest."""
    value = _parsed(value)
    if not isinstance(value, list | tuple):
        raise invalid(f"{name}: must be a list, got {describe(value)}", name)
    return [text_of(one) for one in value]


def _parsed(value: Any) -> Any:
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _named_choices(value: Any) -> tuple[list[Any], list[str]]:
    """The choices, and their names if they have some: {"text": […], "label": […]}. Raises
    InvalidRequest."""
    value = _parsed(value)
    if not (isinstance(value, Mapping) and value.keys() == NAMED_CHOICES):
        return _list_of(value, "choices"), []
    texts, labels = (_list_of(value[name], "choices") for name in ("text", "label"))
    if len(texts) != len(labels):
        raise invalid("choices: text and label have different lengths", "choices")
    return texts, [str(one).strip() for one in labels]


def _right_choice(target: Any, texts: Sequence[Any], labels: Sequence[str]) -> int:
    """The index of the right choice: of its name, its text, its number or its letter. Raises
    InvalidRequest."""
    text = str(target_text(target)).strip()
    letters = list(ascii_uppercase[: len(texts)])
    stripped = [one.strip() if isinstance(one, str) else None for one in texts]
    places = [str(place) for place in range(len(texts))]
    marked = [f"({letter})" for letter in letters]
    names_of: tuple[Sequence[str | None], ...] = (labels, stripped, places, letters, marked)
    if not isinstance(target, str) and not labels:
        names_of = (places,)  # a number is an index, also if a choice is called so
    for names in names_of:
        if text in names:
            return names.index(text)
    raise invalid(
        f"target: {text[:40]!r} is none of the {len(texts)} choices: give its text, its index from "
        "0, or its letter, such as B or (B)",
        "target",
    )
