"""Answers of chats as completions, in the form of OpenAI's older API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jobs.api.answer import ChatCompletion, Choice, PromptLogprob, TokenLogprob, Usage
from jobs.gateway.completions.asked import Call, Echo


def reply(call: Call, job_id: str, completions: Sequence[ChatCompletion]) -> dict[str, Any]:
    choices = [
        _choice(call, number, completion, choice)
        for number, completion in enumerate(completions)
        for choice in completion.choices
    ]
    first = completions[0]
    return {
        **head(job_id, first.created, call.model),
        "choices": choices,
        "usage": usage_of(call, [one.usage for one in completions]),
        "system_fingerprint": first.system_fingerprint,
    }


def head(job_id: str, created: int, model: str) -> dict[str, Any]:
    return {
        "id": f"cmpl-{job_id}",
        "object": "text_completion",
        "created": created,
        "model": model,
    }


def usage_of(call: Call, usages: Sequence[Usage | None]) -> dict[str, Any]:
    """The counts of all jobs together."""
    prompt = sum(one.prompt_tokens for one in usages if one is not None)
    generated = sum(one.completion_tokens for one in usages if one is not None)
    generated = 0 if call.scores_only else generated
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
    }


def _choice(call: Call, number: int, completion: ChatCompletion, choice: Choice) -> dict[str, Any]:
    """A choice of the prompt with this number."""
    text = "" if call.scores_only else choice.message.content or ""
    tokens = Logprobs()
    scored = completion.prompt_logprobs
    if scored is not None:
        tokens.add_prompt(call.echoes[number], scored)
    echoed = ""
    if call.echo:
        echo = call.echoes[number]
        echoed = "".join(tokens.tokens) if echo.first is not None and scored else echo.text
    if choice.logprobs is not None and not call.scores_only:
        tokens.add(choice.logprobs.content or ())
    reply = {
        "index": number * call.n + choice.index,
        "text": echoed + text,
        "logprobs": None if call.logprobs is None else tokens.to_dict(),
        "finish_reason": "length" if call.scores_only else choice.finish_reason,
    }
    if call.token_ids:  # as vLLM has them, of an upstream as far as it sends them
        reply["prompt_token_ids"] = completion.prompt_token_ids
        reply["token_ids"] = [] if call.scores_only else choice.token_ids
    return reply


@dataclass(slots=True)
class Logprobs:
    """`logprobs` of a choice, in the form of OpenAI's completions. `offset`: of the next token in
    the text."""

    offset: int = 0
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add_prompt(
        self, prompt: Echo, scored: Sequence[Mapping[str, PromptLogprob] | None]
    ) -> None:
        """The tokens of a prompt. The first one has nothing before it, so it has no score."""
        of_token = [list(one.values()) for one in scored if one is not None]
        rest = "".join(values[0].decoded_token for values in of_token)
        first = prompt.first or ""
        if prompt.first is None and prompt.text.endswith(rest):
            first = prompt.text[: len(prompt.text) - len(rest)]
        self._append(first, None, None)
        for values in of_token:
            top = [(one.decoded_token, one.logprob) for one in values]
            self._append(values[0].decoded_token, values[0].logprob, top)

    def add(self, generated: Sequence[TokenLogprob]) -> None:
        for one in generated:
            top = [(one.token, one.logprob), *((t.token, t.logprob) for t in one.top_logprobs)]
            self._append(one.token, one.logprob, top)

    def _append(
        self, text: str, logprob: float | None, top: Sequence[tuple[str, float]] | None
    ) -> None:
        best: dict[str, float] = {}
        for token, value in top or ():  # several tokens may be no text of their own
            best[token] = max(value, best.get(token, value))
        self.tokens.append(text)
        self.token_logprobs.append(logprob)
        self.top_logprobs.append(None if top is None else best)
        self.text_offset.append(self.offset)
        self.offset += len(text)

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }
