"""Requests of lm-evaluation-harness as items of scoring jobs and as chat requests.

Nothing here imports lm_eval. Texts are sent as texts, and conversations as messages: the worker has
tokenizer and chat template, encodes and truncates as the `hf` model of lm_eval does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jobs.api.score_request import MAX_CONTINUATIONS
from jobs.errors import invalid

# The text that stands for a conversation begins like this.
CHAT = '{"chat_template_of": '
# Arguments of generation that requests take by the same names.
SAMPLING = (
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
# Arguments of generation that change nothing at these values.
NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "early_stopping": False, "use_cache": True}


def chat_context(messages: Sequence[Mapping[str, Any]], *, complete: bool) -> str:
    """A text that stands for a conversation, since lm_eval's contexts are texts. `complete`: its
    last message has ended; else the answer goes on with that message."""
    content = {"chat_template_of": list(messages), "complete": complete}
    return json.dumps(content, ensure_ascii=False)


def prompt_fields(context: str) -> dict[str, Any]:
    """The fields of an item that has a context as its prompt. Raises InvalidRequest for a
    conversation that a task has changed."""
    if not context.startswith(CHAT):
        return {"prompt": context}
    try:
        content = json.loads(context)
    except ValueError:
        raise invalid(
            "the task adds text to a context that the chat template is applied to, which is "
            "possible on the worker only: evaluate it without --apply_chat_template",
            "messages",
        ) from None
    fields: dict[str, Any] = {"messages": content["chat_template_of"]}
    if not content["complete"]:
        fields["continue_final_message"] = True
    return fields


@dataclass(slots=True)
class Likelihoods:
    """A context and its continuations, with the numbers of the requests that ask for each."""

    context: str
    numbers: dict[str, list[int]] = field(default_factory=dict)

    def item(self) -> dict[str, Any]:
        continuations = list(self.numbers)
        return {
            "type": "loglikelihood",
            **prompt_fields(self.context),
            "continuations": continuations,
        }


def grouped(pairs: Iterable[tuple[str, str]]) -> list[Likelihoods]:
    """The continuations of each context together, and contexts that begin alike one behind the
    other, so that workers compute what they share once. A pair that occurs again is scored once."""
    groups: dict[str, list[Likelihoods]] = {}
    for number, (context, continuation) in enumerate(pairs):
        of_context = groups.setdefault(context, [])
        known = next((one for one in of_context if continuation in one.numbers), None)
        if known is None:
            if not of_context or len(of_context[-1].numbers) == MAX_CONTINUATIONS:
                of_context.append(Likelihoods(context))
            known = of_context[-1]
        known.numbers.setdefault(continuation, []).append(number)
    return [one for context in sorted(groups) for one in groups[context]]


def generation_fields(
    context: str, arguments: Mapping[str, Any], *, max_length: int | None, seed: int
) -> dict[str, Any]:
    """The fields of the chat request that continues a context, from the arguments of generation in
    the form of lm_eval's `normalize_gen_kwargs`. `max_length`: tokens of prompt and answer; None:
    the worker's. `seed`: of a request that draws. Raises InvalidRequest for an argument that is
    not known."""
    given = dict(arguments)
    tokens, stop = given.pop("max_gen_toks"), [one for one in given.pop("until") if one]
    draws, temperature = given.pop("do_sample"), given.pop("temperature", None)
    seed = int(given.pop("seed", 0)) + seed
    fields: dict[str, Any] = {
        "max_tokens": tokens,
        **({"stop": stop} if stop else {}),
        **{name: given.pop(name) for name in SAMPLING if name in given},
    }
    if not draws or temperature == 0:
        fields["temperature"] = 0
    else:
        fields["seed"] = seed
        if temperature is not None:
            fields["temperature"] = temperature
    unknown = [name for name in given if name not in NEUTRAL or NEUTRAL[name] != given[name]]
    if unknown:
        raise invalid(
            f"generation argument {unknown[0]!r} is not known; known are until, max_gen_toks, "
            f"do_sample, temperature, seed, {', '.join(SAMPLING)}",
            unknown[0],
        )
    room = -1
    if max_length is not None:
        room = max_length - tokens
        if room < 1:
            raise invalid(
                f"max_gen_toks is {tokens}, and max_length {max_length} leaves no token for the "
                "prompt: lower one or raise the other",
                "max_gen_toks",
            )
    prompt = prompt_fields(context)
    if "messages" in prompt:
        prompt["separate_reasoning"] = False
    else:
        prompt = {
            "messages": [{"role": "user", "content": context}],
            "apply_chat_template": False,
        }
    return {**prompt, **fields, "truncate_prompt_tokens": room}
