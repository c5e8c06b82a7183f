"""The metrics by name, and what `--metric` names: `name`, `name:argument` or `module:function`.

Metrics are made in child processes (`jobs.scores.child`); this file imports none of their packages.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from jobs.errors import invalid

if TYPE_CHECKING:
    from jobs.scores.outcome import Metric

Figure = Literal["mean", "corpus", "perplexity"]  # how a figure is made of rows
Maker = Callable[[str | None], "Metric"]

TEXT = ("text", "target")
LIKELIHOODS = ("logprob_sum", "scored_tokens", "scored_bytes", "scored_words")
CHOICES = ("choices", "picked_index")
# What a function of the user gets.
FUNCTION_COLUMNS = (
    "run_id", "job_id", "row_index", "repeat_index", "choice_index", "custom_id", "model", "tags",
    "messages", "prompt", "continuation", "target", "metadata", "response_format", "text",
    "reasoning", "tool_calls", "finish_reason", "input_tokens", "output_tokens", "logprob_sum",
    "is_greedy", "scored_tokens", "token_logprobs",
)  # fmt: skip
JUDGE = "judge"
PASS_AT = re.compile(r"pass@([1-9]\d{0,5})")


@dataclass(frozen=True, slots=True)
class Kind:
    """A metric by its name. `make`: None if another model says the value. `package`: of the extra
    `scores`."""

    make: Maker | None
    columns: tuple[str, ...] = TEXT
    target: bool = True  # each row needs one
    text: bool = True  # each row needs a text
    package: str | None = None
    figure: Figure = "mean"


def _of(module: str, maker: str, *first: str) -> Maker:
    """Makes the metric by a class of jobs.scores, which is imported then."""

    def make(argument: str | None) -> Metric:
        made: Metric = getattr(import_module(f"jobs.scores.{module}"), maker)(*first, argument)
        return made

    return make


KINDS = {
    "exact": Kind(_of("text", "Exact")),
    "contains": Kind(_of("text", "Contains")),
    "regex": Kind(_of("text", "Regex"), target=False),
    "number": Kind(_of("text", "Number")),
    "choice": Kind(_of("likelihood", "Choice"), (*TEXT, *CHOICES)),
    "json": Kind(_of("structured", "ValidJson"), ("text",), target=False),
    "json-schema": Kind(
        _of("structured", "JsonSchema"),
        ("text", "response_format"),
        target=False,
        package="jsonschema",
    ),
    "bleu": Kind(_of("translation", "Translation", "bleu"), package="sacrebleu", figure="corpus"),
    "chrf": Kind(_of("translation", "Translation", "chrf"), package="sacrebleu", figure="corpus"),
    "chrf++": Kind(
        _of("translation", "Translation", "chrf++"), package="sacrebleu", figure="corpus"
    ),
    "edit": Kind(_of("text", "Edit"), package="rapidfuzz"),
    "math": Kind(_of("mathematics", "Math"), package="math-verify"),
    JUDGE: Kind(None, target=False),
    "perplexity": Kind(
        _of("likelihood", "Perplexity"), LIKELIHOODS, target=False, text=False, figure="perplexity"
    ),
}


@dataclass(frozen=True, slots=True)
class Spec:
    """A metric with its argument. `text`, as it was written, is its name in the table."""

    text: str
    name: str
    argument: str | None = None

    @property
    def samples(self) -> int | None:
        """k of pass@k; None for every other metric."""
        match = PASS_AT.fullmatch(self.name)
        return int(match[1]) if match else None

    @property
    def kind(self) -> Kind:
        """Not of pass@k, which reads the scores of another metric."""
        if self.name in KINDS:
            return KINDS[self.name]
        return Kind(self._function, FUNCTION_COLUMNS, target=False, text=False)

    def make(self) -> Metric:
        """The metric, which scores rows in this process. Raises InvalidRequest, and ImportError
        without its package."""
        if self.kind.make is None:
            raise invalid(f"{self.name} is asked through the queues of its model", "metric")
        return self.kind.make(self.argument)

    def _function(self, argument: str | None) -> Metric:
        from jobs.scores.function import Function

        return Function(self.text, KINDS)


def parse_spec(text: str) -> Spec:
    """The metric that a text names. Raises InvalidRequest for an unknown one."""
    name, colon, argument = text.partition(":")
    if name in KINDS:
        if colon and not argument:
            raise invalid(f"{text!r} has nothing after the colon", "metric")
        if name == JUDGE and not colon:
            raise invalid("judge needs the model that grades: judge:MODEL", "metric")
        return Spec(text, name, argument if colon else None)
    if PASS_AT.fullmatch(name):
        if not argument:
            raise invalid(
                f"{name} needs the metric that says which samples are right: {name}:exact",
                "metric",
            )
        base = parse_spec(argument)
        if base.samples is not None:
            raise invalid(f"{text!r}: pass@k of pass@k is not defined", "metric")
        return Spec(text, name, argument)
    place, _, function = text.rpartition(":")
    is_module = place.endswith(".py") or all(one.isidentifier() for one in place.split("."))
    if is_module and function.isidentifier():
        return Spec(text, text)
    listed = [one.strip() for one in name.split(",")]
    if len(listed) > 1 and all(one in KINDS for one in listed):
        options = " ".join(f"--metric {one}" for one in listed)
        raise invalid(f"{text!r} is no single metric: repeat the option, {options}", "metric")
    near = difflib.get_close_matches(name, KINDS, 1)
    raise invalid(
        f"no metric {name!r}{f' (did you mean {near[0]}?)' if near else ''}; metrics are "
        f"{', '.join(KINDS)}, pass@K:METRIC, module:function and file.py:function",
        "metric",
    )
