"""Help about requests: help() in Python, names in an editor."""

from __future__ import annotations

import inspect
import pydoc
import re

import pytest

from jobs.api.job_options import JobOptions
from jobs.api.params import JobFields, RequestFields
from jobs.api.request import ChatRequest
from jobs.api.sampling import Sampling


@pytest.mark.parametrize("model", [ChatRequest, Sampling])
def test_help_begins_with_the_names_and_the_description(model: type[Sampling]) -> None:
    text = pydoc.plain(pydoc.render_doc(model))
    begin = text.partition("Method resolution order")[0]
    assert not re.search("pydantic|Validator|FieldInfo|Annotated", begin)
    assert inspect.cleandoc(model.__doc__ or "").splitlines()[0] in begin
    assert list(inspect.signature(model).parameters) == sorted(
        model.model_fields, key=lambda name: not model.model_fields[name].is_required()
    )


def test_the_description_of_a_request_names_every_field() -> None:
    described = set(re.findall(r"\w+", ChatRequest.__doc__ or ""))
    assert not (ChatRequest.model_fields.keys() | JobOptions.model_fields.keys()) - described


def test_type_checkers_know_every_field() -> None:
    assert RequestFields.__annotations__.keys() == {
        *ChatRequest.model_fields,
        *ChatRequest.other_names,
    }
    assert JobFields.__annotations__.keys() == JobOptions.model_fields.keys()
    assert RequestFields.__required_keys__ == {"model", "messages"}
