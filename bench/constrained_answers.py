"""Constrained answers of a real model: how many end by themselves, and how many are invalid.

    python -m bench.constrained_answers --model FILE.gguf --prompts 200
    python -m bench.constrained_answers --model FILE.gguf --schemas SCHEMAS.jsonl

Without SCHEMAS.jsonl, each prompt is asked with each of ten schemas whose strings, numbers and
arrays are bounded. With it, each of its schemas, {"name", "schema"}, is asked once.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jsonschema.exceptions import ValidationError
from jsonschema.validators import validator_for

from jobs.api.request import ChatRequest
from jobs.errors import JobError
from worker import Engine
from worker.local.collect import CollectingSink

TOPICS = (
    "a person", "a town by the sea", "a book about birds", "a recipe with eggs", "a train",
    "an old house", "a football match", "a small company", "a song", "a storm",
    "a museum", "a bicycle", "a school", "a planet", "a forest",
    "a lamp", "a cat", "a bridge", "a market", "a letter",
)  # fmt: skip
ANGLES = (
    "briefly", "for a child", "for an expert", "as in an encyclopedia", "as an advertisement",
    "as a joke", "with odd names", "with large numbers", "in French", "as a list of facts",
)  # fmt: skip
TEXT = {"type": "string", "minLength": 1, "maxLength": 24}
WORDS = {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3}
COUNT = {"type": "integer", "minimum": 0, "maximum": 999}


def closed(**properties: Any) -> dict[str, Any]:
    """An object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


BOUNDED: tuple[dict[str, Any], ...] = (
    closed(name=TEXT, age={"type": "integer", "minimum": 0, "maximum": 120}),
    {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 4},
    closed(title=TEXT, kind={"anyOf": [{"const": "short"}, {"const": "long"}, {"type": "null"}]}),
    closed(
        score={"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
        sure={"type": "boolean"},
    ),
    {
        **closed(a={"$ref": "#/$defs/pair"}, b={"$ref": "#/$defs/pair"}),
        "$defs": {"pair": closed(x=COUNT, y=COUNT)},
    },
    closed(day={"type": "string", "format": "date"}, at={"type": "string", "format": "time"}),
    closed(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"}, words=WORDS),
    {"type": "array", "items": closed(word=TEXT, count=COUNT), "minItems": 2, "maxItems": 3},
    {
        "type": "array",
        "prefixItems": [TEXT, COUNT, {"type": "boolean"}],
        "items": False,
        "minItems": 3,
    },
    closed(of={"oneOf": [closed(cat=TEXT), closed(dog=COUNT)]}, tags=WORDS),
)


class Asked(NamedTuple):
    name: str
    schema: dict[str, Any]
    prompt: str


def bounded(prompts: int) -> Iterator[Asked]:
    """Each prompt with each bounded schema."""
    texts = [f"Describe {topic} {angle}, as JSON." for topic in TOPICS for angle in ANGLES]
    for text in texts[:prompts]:
        for number, schema in enumerate(BOUNDED):
            yield Asked(f"bounded {number}", schema, text)


def of_file(path: Path) -> Iterator[Asked]:
    for line in path.open(encoding="utf-8"):
        row = json.loads(line)
        text = f"Give a short example that follows this JSON schema:\n{json.dumps(row['schema'])}"
        yield Asked(row["name"], row["schema"], text)


def answers(
    engine: Engine, questions: Iterator[Asked], options: argparse.Namespace
) -> Iterator[tuple[Asked, str, str]]:
    """Each question with the reason why its answer has ended, and its text; or "refused" or
    "failed", and the error."""
    running: deque[tuple[Asked, CollectingSink, Any]] = deque()
    for number, one in enumerate(questions):
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": one.schema}}
        sink = CollectingSink()
        try:
            request = ChatRequest(
                model="m",
                messages=[{"role": "user", "content": one.prompt}],
                response_format=form,
                max_tokens=options.max_tokens,
                temperature=options.temperature,
                repetition_penalty=options.repetition_penalty,
                seed=number,
            )
            running.append((one, sink, engine.submit(request, sink)))
        except JobError as error:
            yield one, "refused", error.message
            continue
        while len(running) >= 2 * options.batch:
            yield from ended(engine, running)
    while running:
        yield from ended(engine, running)


def ended(engine: Engine, running: deque[Any]) -> Iterator[tuple[Asked, str, str]]:
    """Steps, and the answers that have ended then."""
    for _ in range(8):
        engine.step()
    for entry in [entry for entry in running if entry[2].done]:
        running.remove(entry)
        one, sink, _ = entry
        try:
            (choice,) = sink.completion().choices
        except JobError as error:
            yield one, "failed", error.message
        else:
            yield one, choice.finish_reason, choice.message.content or ""


def fault(schema: dict[str, Any], text: str) -> str | None:
    """Why the package jsonschema finds an answer invalid."""
    kind = validator_for(schema)
    try:
        kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text))
    except (ValidationError, ValueError) as error:
        return str(error).splitlines()[0]
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--model", required=True)
    parser.add_argument("--schemas", type=Path)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=1000)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--repetition-penalty", type=float)
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()
    engine = Engine.load(options.model, max_batch=options.batch)
    questions = of_file(options.schemas) if options.schemas else bounded(options.prompts)
    begin, ends, wrong = time.perf_counter(), Counter[str](), 0
    for one, end, text in answers(engine, questions, options):
        ends[end] += 1
        reason = fault(one.schema, text) if end == "stop" else text[-80:]
        if end == "stop" and reason is not None:
            wrong += 1
        if reason is not None:
            print(f"{one.name}: {end}: {reason!r:.160}")
    engine.close()
    print(f"{sum(ends.values())} questions in {time.perf_counter() - begin:.0f} s")
    for end, number in ends.most_common():
        print(f"  {number:5} {end}")
    print(f"  {wrong:5} of those that ended by stop are invalid")


if __name__ == "__main__":
    main()
