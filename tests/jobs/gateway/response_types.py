"""Responses, events and items by the types of the openai package: anything else fails a test."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from pydantic import TypeAdapter

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)


def response_of(content: Any) -> Response:
    return Response.model_validate(content, strict=True)


def items_of(content: Any) -> list[Any]:
    return [ITEM.validate_python(item, strict=True) for item in content]


def events_of(content: Iterable[Any], first: int = 0) -> list[Any]:
    """The events, whose numbers grow by one from `first`."""
    events = [EVENT.validate_python(event, strict=True) for event in content]
    assert [event.sequence_number for event in events] == [*range(first, first + len(events))]
    return events


def text_of(events: Iterable[Any]) -> str:
    return "".join(one.delta for one in events if one.type == "response.output_text.delta")
