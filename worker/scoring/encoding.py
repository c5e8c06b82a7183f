"""Items of a scoring request → the token ids that score them.

Texts become tokens as in lm-evaluation-harness, so that figures agree: white space at the end of a
prompt belongs to the continuation, and both are encoded together. The windows of a text share its
token ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from jobs.api.message import Message
from jobs.api.request import ChatRequest
from jobs.api.score_request import Choice, Item, LogLikelihood, Perplexity, ScoreRequest
from jobs.errors import JobError, invalid
from jobs.sizes import counted
from worker.backend import TooLong
from worker.engine.token_ids import TokenSlice, token_ids
from worker.prompt.builder import PromptBuilder

# Of one request. Each sequence takes about 2 kB of memory, and each token about 60 bytes until the
# result is written.
MAX_SEQUENCES = 10_000  # continuations and windows
MAX_TOKENS = 2**22  # of prompts with their continuations, and of texts


class Targets(NamedTuple):
    """Token ids; those from `first` on are scored, those before are their context."""

    token_ids: Sequence[int]
    first: int  # at least 1
    truncated: int = 0  # tokens that were cut before them


class Encoding(Protocol):
    """The facts of a model that texts become tokens by. prefix_token_id: the token before a text
    without a prompt, None if the model has none."""

    @property
    def prompts(self) -> PromptBuilder: ...

    @property
    def context_length(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def prefix_token_id(self) -> int | None: ...


class ItemEncoder:
    """Encodes the items of one request, and counts what they take of its limits. Errors are
    JobErrors of the item."""

    def __init__(self, model: Encoding, request: ScoreRequest) -> None:
        self._model, self._request = model, request
        context, most = model.context_length, request.max_length
        self._context = context if most is None else min(context, most)
        self._special = request.add_special_tokens
        self._sequences = self._tokens = 0  # of the items that could be encoded

    def targets(self, item: Item) -> list[Targets]:
        """The targets of each continuation, or choice, of an item, or the windows of its text.
        Raises JobError."""
        before = self._sequences, self._tokens
        try:
            if isinstance(item, Perplexity):
                return self._windows(item)
            return self._continuations(item)
        except BaseException:
            self._sequences, self._tokens = before
            raise

    def _count(self, sequences: int, tokens: int, param: str) -> None:
        """Count what an item adds. Raises InvalidRequest if that is more than a request may
        have."""
        self._sequences += sequences
        self._tokens += tokens
        for count, most, things in (
            (self._sequences, MAX_SEQUENCES, "continuations and windows"),
            (self._tokens, MAX_TOKENS, "tokens"),
        ):
            if count > most:
                raise invalid(
                    f"{param}: with this item, the request has {count:,} {things}, and at most "
                    f"{most:,} are possible: put fewer items into one job",
                    param,
                )

    def _continuations(self, item: LogLikelihood | Choice) -> list[Targets]:
        given = item.continuations if isinstance(item, LogLikelihood) else item.choices
        name = "continuations" if isinstance(item, LogLikelihood) else "choices"
        pairs = self._pairs(item, given, name)
        found = []
        for number, pair in enumerate(pairs):
            found.append(self._fitting(*pair, f"{name}[{number}]"))
            self._count(1, len(found[-1].token_ids), name)
        return found

    def _windows(self, item: Perplexity) -> list[Targets]:
        window = self._context if item.window is None else item.window
        stride = window if item.stride is None else item.stride
        if window > self._context:
            raise invalid(
                f"window: at most the context of {self._context} tokens, got {window}", "window"
            )
        if stride > window:
            raise invalid(f"stride: at most the window, {window}, got {stride}", "stride")
        ids = self._ids(item.text, "text")
        if item.prefix:
            ids = [self._prefix(), *ids]
        if len(ids) < 2:
            raise invalid("text: there is no token to score", "text")
        count = 1 + max(0, -(-(len(ids) - 1 - window) // stride))
        if count > MAX_SEQUENCES:
            raise invalid(
                f"stride: {counted(len(ids), 'token')} in steps of {stride} are {count} windows, "
                f"and at most {MAX_SEQUENCES} are possible: set a larger one",
                "stride",
            )
        self._count(count, len(ids), "text")
        return list(rolling_windows(ids, window, stride))

    def _pairs(
        self, item: LogLikelihood | Choice, given: Sequence[str | list[int]], name: str
    ) -> Iterator[tuple[list[int], list[int]]]:
        """The token ids of context and target of each continuation."""
        prompt, text, special = item.prompt, "", self._special
        if item.messages is not None:
            prompt = self._rendered(item, item.messages)
        if isinstance(prompt, str):
            text = prompt.rstrip()
            if item.messages is not None and not self._request.messages_as_text:
                # The chat template decides where a prompt ends, and writes the special tokens.
                text, special = prompt, False
            context = self._encode(text, special=special) if text else []
        else:
            context = self._check(prompt or [], "prompt")
        for number, one in enumerate(given):
            target_name = f"{name}[{number}]"
            if not isinstance(one, str):
                target = self._check(one, target_name)
            elif text:
                target = self._encode(f"{prompt}{one}", special=special)[len(context) :]
            else:
                spaces = prompt if isinstance(prompt, str) else ""
                target = self._encode(spaces + one, special=False)
            if not target:
                raise invalid(f"{target_name} adds no token to the prompt", target_name)
            yield self._with_context(context, target, target_name)

    def _rendered(self, item: LogLikelihood | Choice, messages: Sequence[Message]) -> str:
        request = ChatRequest(
            model=self._request.model,
            messages=[one.to_dict() for one in messages],
            continue_final_message=item.continue_final_message,
            chat_template_kwargs=self._request.chat_template_kwargs,
        )
        return self._model.prompts.render(request)

    def _with_context(
        self, context: list[int], target: list[int], name: str
    ) -> tuple[list[int], list[int]]:
        """An empty context is the prefix token; a target that begins with it is its own context."""
        if context:
            return context, target
        prefix = self._prefix()
        if target[0] != prefix:
            return [prefix], target
        if len(target) < 2:
            raise invalid(f"{name} is the prefix token alone, which nothing comes before", name)
        return target[:1], target[1:]

    def _fitting(self, context: list[int], target: list[int], name: str) -> Targets:
        """The targets within the model's context, which the last target is no part of."""
        ids, most = [*context, *target], self._context + 1
        if len(ids) <= most:
            return Targets(ids, len(context))
        advice = 'shorten the prompt, or set truncate to "left"'
        if len(target) > self._context:
            advice = "shorten it"
        elif self._request.truncate == "left":
            cut = len(ids) - most
            return Targets(ids[cut:], len(context) - cut, cut)
        fact = (
            f"the prompt has {len(context)} tokens and {name} {len(target)}, and the context holds "
            f"{self._context}: {advice}"
        )
        if self._context < self._model.context_length:  # by max_length of the request
            raise JobError("context_length_exceeded", fact, name)
        raise TooLong(fact, name, len(ids) - 1)

    def _ids(self, value: str | list[int], name: str) -> list[int]:
        if isinstance(value, str):
            return self._encode(value, special=self._special)
        return self._check(value, name)

    def _check(self, ids: list[int], name: str) -> list[int]:
        return token_ids(ids, self._model.vocab_size, name)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        return self._model.prompts.encode(text, special_tokens=special)

    def _prefix(self) -> int:
        given = self._request.prefix_token_id
        if given is not None:
            return self._check([given], "prefix_token_id")[0]
        known = self._model.prefix_token_id
        if known is None:
            raise invalid(
                "the model has neither a BOS nor an EOS token, which an empty prompt begins with: "
                "set prefix_token_id",
                "prefix_token_id",
            )
        return known


def rolling_windows(ids: Sequence[int], window: int, stride: int) -> Iterator[Targets]:
    """Windows of at most `window` input tokens, of which the first one scores as many and each
    further one the next `stride`. The first of `ids` is context only. As lm-evaluation-harness
    makes them, with `stride` = `window`."""
    last = len(ids) - 1
    end = min(window, last)
    yield Targets(TokenSlice(ids, 0, end + 1), 1)
    while end < last:
        count = min(stride, last - end)
        end += count
        yield Targets(TokenSlice(ids, end - window, end + 1), window - count + 1)
