"""Constrained answers with the forced tokens of their grammars computed together, and one by one.

    python -m bench.forced_tokens --model FILE.gguf [--rounds 5] [--batches 1,16]

The forms: an object with long fixed keys and short values, a forced call of a tool, a form with a
fixed text, and the bounded schemas of `bench.constrained_answers`. Both contestants are one engine
that answers the same requests in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import click

from bench.constrained_answers import BOUNDED, TEXT, TOPICS, closed
from bench.harness import alternate, median, report
from jobs.api.request import ChatRequest
from worker import Engine
from worker.constraints.matcher import Matcher
from worker.device import choose_device
from worker.local.collect import CollectingSink

NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
LONG_KEYS = closed(
    customer_reference_number=NUMBER,
    preferred_delivery_method={"enum": ["post", "courier", "collect"]},
    estimated_delivery_in_days=NUMBER,
    requires_signature_on_delivery={"type": "boolean"},
    number_of_packages=NUMBER,
    additional_instructions_for_the_courier=TEXT,
)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_current_weather_forecast",
        "parameters": closed(number_of_days_ahead=NUMBER, temperature_unit={"enum": ["C", "F"]}),
    },
}
REPORT = r"The inspection of item [0-9]{3} is finished\. Its condition is (good|fair|poor)\. "
FIXED = REPORT + r"It must be inspected again after [0-9]{1,2} months\."
FORMS: dict[str, list[dict[str, Any]]] = {
    "long keys": [{"guided_json": LONG_KEYS}],
    "tool call": [{"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}],
    "fixed text": [{"guided_regex": FIXED}],
    "bounded schemas": [{"guided_json": schema} for schema in BOUNDED],
}

Clock = Callable[[], float]


@contextmanager
def one_by_one() -> Iterator[None]:
    """Nothing is forced for the scheduler; the masks are the same."""
    with mock.patch.object(Matcher, "forced_tokens", lambda *_: ()):
        yield


def requests(forms: list[dict[str, Any]], rows: int) -> list[ChatRequest]:
    return [
        ChatRequest.parse(
            {
                "model": "m",
                "messages": [{"role": "user", "content": f"Describe {TOPICS[at % len(TOPICS)]}."}],
                "max_tokens": 300,
                "temperature": 0.7,
                "seed": at,
                "return_token_ids": True,
                **forms[at % len(forms)],
            }
        )
        for at in range(rows)
    ]


class Run:
    """The answers of an engine to the same requests: rows per second of a clock."""

    def __init__(self, engine: Engine, asked: list[ChatRequest], clock: Clock) -> None:
        self._engine, self._asked, self._clock = engine, asked, clock
        self.steps = 0
        self.answers: list[Any] = []

    def __call__(self) -> float:
        core, sinks = self._engine._core, [CollectingSink() for _ in self._asked]
        before, begin = core.steps, self._clock()
        for request, sink in zip(self._asked, sinks, strict=True):
            self._engine.submit(request, sink)
        while self._engine.step():
            pass
        spent = self._clock() - begin
        self.steps = core.steps - before
        self.answers = [one.completion().choices[0].token_ids for one in sinks]
        return len(self._asked) / spent

    def alone(self) -> float:
        with one_by_one():
            return self()


def query_seconds(engine: Engine, asked: list[ChatRequest], clock: Clock) -> tuple[float, float]:
    """Microseconds of a query for forced tokens, and the share of all of them in the time."""
    spent, number, query = 0.0, 0, Matcher.forced_tokens

    def timed(*given: Any) -> Any:
        nonlocal spent, number
        begin = clock()
        found = query(*given)
        spent, number = spent + clock() - begin, number + 1
        return found

    with mock.patch.object(Matcher, "forced_tokens", timed):
        rate = Run(engine, asked, clock)()
    return spent / max(number, 1) * 1e6, spent * rate / len(asked)


def compare(
    engine: Engine, name: str, batch: int, asked: list[ChatRequest], rounds: int, clock: Clock
) -> dict[str, Any]:
    together, single = Run(engine, asked, clock), Run(engine, asked, clock)
    found = alternate({"one by one": single.alone, "together": together}, rounds)
    ratios = [b / a for a, b in zip(found["one by one"], found["together"], strict=True)]
    micros, share = query_seconds(engine, asked, clock)
    tokens = sum(map(len, together.answers))
    return {
        "form": name,
        "batch": batch,
        "one by one, rows/s": median(found["one by one"]),
        "together, rows/s": median(found["together"]),
        "ratio": median(ratios),
        "least and greatest": f"{min(ratios):.2f}, {max(ratios):.2f}",
        "tokens a row": tokens / len(asked),
        "steps": f"{single.steps} → {together.steps}",
        "query, µs": micros,
        "share of queries": f"{share:.2%}",
        "same tokens": sum(a == b for a, b in zip(together.answers, single.answers, strict=True)),
        "rows": len(asked),
    }


@click.command()
@click.option("--model", required=True)
@click.option("--device", default="auto", show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--rows", default=32, show_default=True)
@click.option("--batches", default="1,16", show_default=True)
@click.option("--forms", default=",".join(FORMS), show_default=True)
@click.option(
    "--cpu-time", is_flag=True, help="Seconds of CPU time: on one core of a busy machine."
)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON file to write.")
def main(
    model: str,
    device: str,
    rounds: int,
    rows: int,
    batches: str,
    forms: str,
    cpu_time: bool,
    out: Path | None,
) -> None:
    """Measure rows per second with forced tokens computed together and one by one."""
    table = []
    place = choose_device(device)
    clock = time.process_time if cpu_time else time.perf_counter
    for batch in map(int, batches.split(",")):
        engine = Engine.load(model, device=str(place), max_batch=batch, tool_parser="hermes")
        measure = partial(compare, engine, batch=batch, rounds=rounds, clock=clock)
        table += [
            measure(name=name, asked=requests(FORMS[name], rows if batch > 1 else rows // 4))
            for name in forms.split(",")
        ]
        engine.close()
    report(f"Forced tokens, {model}, {place}", table, str(place), out)


if __name__ == "__main__":
    main()
