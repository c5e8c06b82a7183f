"""A request for completions, as the requests of chats, and errors with its own names of fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jobs.api.wire import describe
from jobs.errors import JobError, invalid
from jobs.gateway.options import about, take_flag, wants_usage
from jobs.gateway.tokenizers import Prompts

MAX_PROMPTS = 1000
DEFAULT_TOKENS = 16  # of OpenAI's completions
MOST_LOGPROBS = 20

NOT_OF_COMPLETIONS = (
    *("messages", "prompt_token_ids", "apply_chat_template", "prompt_logprobs"),
    "thinking_token_budget",
)
OF_PROMPT = ("messages", "prompt_token_ids")  # fields of a job that the prompt becomes

Prompt = str | list[int]


class Echo(NamedTuple):
    """The text of a prompt. `first`: that of its first token, if the prompt is token ids."""

    text: str
    first: str | None = None

    @classmethod
    def of(cls, prompt: Prompt, tokenizer: Prompts | None) -> Echo:
        """Without a tokenizer, as of a model behind another server, ids have no text."""
        if isinstance(prompt, str):
            return cls(prompt)
        if tokenizer is None:
            return cls("", "")
        return cls(tokenizer.decode(prompt), tokenizer.token_text(prompt[0]))


@dataclass(frozen=True, slots=True)
class Call:
    """A request: its prompts, and what its reply has. `scores_only`: no token is generated, though
    the job of each prompt generates one. `token_ids`: the reply has those of prompts and
    answers. `echoes`: of the prompts, with `echo`."""

    model: str
    prompts: Sequence[Prompt]
    rest: Mapping[str, Any]  # fields of each job
    n: int
    echo: bool
    logprobs: int | None
    scores_only: bool
    stream: bool
    usage: bool
    token_ids: bool
    echoes: Sequence[Echo] = ()

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Call:
        """Raises InvalidRequest."""
        rest = dict(body)
        echo = take_flag(rest, "echo")
        stream = take_flag(rest, "stream")
        logprobs = _integer(rest, "logprobs", 0, MOST_LOGPROBS)
        tokens = _integer(rest, "max_tokens", 0, 2**31)
        if rest.pop("suffix", None):
            raise invalid("suffix is not supported: put it into the prompt", "suffix")
        for name in NOT_OF_COMPLETIONS:
            if rest.pop(name, None) is not None:
                raise invalid(f"{name} is no field of a completion: remove it", name)
        if tokens == 0 and not echo:
            raise invalid(
                "max_tokens: 0 tokens leave nothing to reply: set echo as well", "max_tokens"
            )
        if stream and echo and logprobs is not None:
            raise invalid(
                "stream: the log-probabilities of a prompt are not streamed: set it to false",
                "stream",
            )
        prompts = _prompts(rest.pop("prompt", None))
        options = rest.get("job")
        if len(prompts) > 1 and isinstance(options, dict):
            for name in ("id", "row", "custom_id"):
                if options.get(name) is not None:
                    raise invalid(
                        f"job.{name}: the request has {len(prompts)} prompts, of which each is a "
                        "job: send them one by one",
                        f"job.{name}",
                    )
        n = rest.get("n")
        return cls(
            model=str(rest.get("model")),
            prompts=prompts,
            rest=rest | {"max_tokens": DEFAULT_TOKENS if tokens is None else max(1, tokens)},
            n=n if isinstance(n, int) else 1,
            echo=echo,
            logprobs=logprobs,
            scores_only=tokens == 0,
            stream=stream,
            usage=wants_usage(body),
            token_ids=rest.get("return_token_ids") is True,
        )

    def jobs(self) -> list[dict[str, Any]]:
        """The request of each prompt's job."""
        fields: dict[str, Any] = {**self.rest, "apply_chat_template": False, "stream": self.stream}
        if self.logprobs is not None:
            fields |= {"logprobs": True, "top_logprobs": self.logprobs}
            if self.echo:
                fields["prompt_logprobs"] = self.logprobs
        return [{**fields, **_source(prompt)} for prompt in self.prompts]


def about_prompt(error: JobError) -> JobError:
    """An error of a job that names the field of this route."""
    if error.param is None or error.param.partition("[")[0] not in OF_PROMPT:
        return error
    return about(error, "prompt")


def _source(prompt: Prompt) -> dict[str, Any]:
    """The fields of a request that hold its prompt."""
    if isinstance(prompt, str):
        return {"messages": [{"role": "user", "content": prompt}]}
    return {"messages": [{"role": "user", "content": ""}], "prompt_token_ids": prompt}


def _prompts(value: Any) -> list[Prompt]:
    """The prompts of a request: one or several, as texts or as token ids. Raises InvalidRequest."""
    if value is None:
        raise invalid("field 'prompt' is required", "prompt")
    if _is_prompt(value):
        return [value]
    if isinstance(value, list) and value and all(map(_is_prompt, value)):
        if len(value) > MAX_PROMPTS:
            raise invalid(
                f"prompt: a request has at most {MAX_PROMPTS} prompts, got {len(value)}", "prompt"
            )
        return value
    raise invalid(
        "prompt: expected a text, token ids, or a list of texts or of lists of token ids, got "
        f"{describe(value)}",
        "prompt",
    )


def _is_prompt(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(type(one) is int for one in value)
    return isinstance(value, str)


def _integer(body: dict[str, Any], name: str, least: int, most: int) -> int | None:
    """Remove an integer. Raises InvalidRequest."""
    value = body.pop(name, None)
    if value is None:
        return None
    if type(value) is not int or not least <= value <= most:
        raise invalid(
            f"{name}: expected an integer from {least} to {most}, got {describe(value)}", name
        )
    return value
