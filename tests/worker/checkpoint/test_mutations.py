"""A damaged model folder loads, or fails with a JobError."""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs import JobError
from tests.worker.folders import WEIGHTS, edit_json, loaded, refusal
from worker.prompt.encoder import PromptEncoder

INDEX = "model.safetensors.index.json"
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS, INDEX)
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    3,
    2**31,
    2**63,
    10**400,
    0.5,
    1e308,
    float("nan"),
    "",
    "a",
    "\ud83d",
    "\x00",
    "../x",
    "{{ messages[0].content }}\ud83d",
    [],
    [1],
    [None],
    ["a", "b"],
    {},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Sequence", "normalizers": [], "pretokenizers": [], "decoders": [], "processors": []},
    {"Regex": "(", "String": ""},
)


def at(value: Any, steps: list[int]) -> tuple[Any, Any]:
    """A container somewhere in a JSON value, and one of its keys."""
    while True:
        step = steps.pop()
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = keys[step % len(keys)]
        inner = value[key]
        if not steps or not isinstance(inner, dict | list) or not inner:
            return value, key
        value = inner


def mutate(value: Any, action: str, steps: list[int], odd: Any) -> None:
    container, key = at(value, steps)
    if action == "remove":
        del container[key]
    elif action == "add" and isinstance(container, dict):
        container[f"{key}_"] = odd
    else:
        container[key] = odd


def edit_header(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    raw = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + content[8 + length :])


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(FILES),
    action=st.sampled_from(["replace", "replace", "remove", "add"]),
    steps=st.lists(st.integers(0, 2**16), min_size=1, max_size=6),
    odd=st.sampled_from(ODD),
)
@pytest.mark.timeout(600)
def test_a_mutated_file_is_refused_by_a_joberror_or_loads(
    original: Path, sharded_original: Path, name: str, action: str, steps: list[int], odd: Any
) -> None:
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "m"
        shutil.copytree(sharded_original if name == INDEX else original, folder)
        edit = edit_header if name == WEIGHTS else edit_json
        edit(folder / name, lambda values: mutate(values, action, list(steps), odd))
        try:
            model = loaded(folder)
            PromptEncoder(model.tokenizer, 64).encode("hello")
        except JobError as error:
            assert error.message


@settings(max_examples=60)
@given(
    name=st.sampled_from(FILES),
    place=st.floats(0, 1, exclude_max=True),
    inserted=st.binary(max_size=3),
    removed=st.integers(0, 8),
)
def test_damaged_bytes_are_refused_by_a_joberror_or_load(
    original: Path,
    sharded_original: Path,
    name: str,
    place: float,
    inserted: bytes,
    removed: int,
) -> None:
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "m"
        shutil.copytree(sharded_original if name == INDEX else original, folder)
        content = (folder / name).read_bytes()
        start = int(place * len(content))
        (folder / name).write_bytes(content[:start] + inserted + content[start + removed :])
        try:
            loaded(folder)
        except JobError as error:
            assert error.message


@pytest.mark.parametrize("charsmap", ["AAAA", "/////w==", ""])
def test_an_unparsable_charsmap_is_refused(folder: Path, charsmap: str) -> None:
    """The library panics on it."""
    normalizer = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    edit_json(folder / "tokenizer.json", lambda values: values.update(normalizer=normalizer))
    assert refusal(folder).startswith(f"{folder / 'tokenizer.json'} is not a tokenizer: ")


def set_template(folder: Path, template: str) -> None:
    config = folder / "tokenizer_config.json"
    edit_json(config, lambda values: values.update(chat_template=template))
    (folder / "chat_template.jinja").unlink(missing_ok=True)


@pytest.mark.parametrize("end", ["\ud83d", "{{ '\ud83d' }}"])
def test_a_template_with_half_a_character_is_refused(folder: Path, end: str) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}" + end
    edit_json(
        folder / "tokenizer_config.json", lambda values: values.update(chat_template=template)
    )
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert "the model's chat template contains half a character" in refusal(folder)


def test_a_template_that_writes_half_a_character_fails_requests_only(folder: Path) -> None:
    template = "{{ messages[0].content }}{{ '\\ud83d' }}"
    edit_json(
        folder / "tokenizer_config.json", lambda values: values.update(chat_template=template)
    )
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert loaded(folder).template is not None
