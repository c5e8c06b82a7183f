"""Compiles the grammars of a model's requests: what the answer must be, behind its reasoning."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from llguidance import LLMatcher, LLTokenizer

from jobs.api.grammar import Grammar, Parts, joined, limits, named, refusal
from jobs.api.request import ChatRequest
from worker.constraints.calls import Write, forced_calls

logger = logging.getLogger(__name__)

KNOWN_GRAMMARS = 64  # kept compiled
ANSWER = "answer"  # the name of a request's grammar within the one of the completion


@dataclass(frozen=True, eq=False)
class CompiledGrammar:
    """The state of a completion before its first token. May be used by several threads. `ends`: the
    end tokens of the model; `field`: of the request, in errors."""

    start: LLMatcher
    ends: frozenset[int]
    field: str


class Grammars:
    """Of one model. Thread-safe. `make_vocabulary` takes seconds: it is called for the first
    request that needs it. `ends`: the tokens that end completions."""

    def __init__(
        self, make_vocabulary: Callable[[], LLTokenizer], ends: frozenset[int], model: str
    ) -> None:
        self._make_vocabulary, self._ends, self._model = make_vocabulary, ends, model
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._known: OrderedDict[str, LLMatcher] = OrderedDict()

    def compile(self, parts: Parts, wanted: Grammar) -> CompiledGrammar:
        """Compile the grammar of a completion, made of what a request `wanted`. Raises
        InvalidRequest."""
        text = joined(parts)
        with self._lock:
            found = self._known.pop(text, None) or self._compiled(text, wanted)
            self._known[text] = found
            while len(self._known) > KNOWN_GRAMMARS:
                self._known.popitem(last=False)
        return CompiledGrammar(found, self._ends, wanted.field)

    def _compiled(self, text: str, wanted: Grammar) -> LLMatcher:
        if self._vocabulary is None:
            begin = time.monotonic()
            self._vocabulary = self._make_vocabulary()
            seconds = time.monotonic() - begin
            logger.info("%s: its vocabulary is ready for grammars (%.1f s)", self._model, seconds)
        found = LLMatcher(self._vocabulary, text, log_level=0, limits=limits())
        first = found.deep_copy()
        legal = any(first.compute_bitmask())
        if first.is_error() or not legal:
            raise refusal(first.get_error() or "no text fits it", wanted)
        return found


def of_request(
    request: ChatRequest, syntax: str | None, write: Write
) -> tuple[Parts, Grammar] | None:
    """The grammar ANSWER of the answer to a request, and what the request gave; None: any text.
    `syntax`: of the model's tool calls. Raises InvalidRequest."""
    form, tools = request.form, request.forced_tools
    if form is not None:
        answer = named(ANSWER, form)
    elif tools is not None:
        several = request.tool_choice == "required" and request.parallel_tool_calls is not False
        answer, form = forced_calls(ANSWER, tools, syntax, write, several=several)
    else:
        return None
    return answer, form
