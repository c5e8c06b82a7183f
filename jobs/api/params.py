"""The keyword arguments of a request, for type checkers and editors.

`ChatRequest` validates the values when it is made; nothing here is read at run time, except the
names of `CompletionFields`.
"""

# Without `from __future__ import annotations`: it would hide `Required` at run time.

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, Protocol, Required, TypeAlias, TypedDict

from pydantic import BaseModel


class MessageFields(TypedDict, total=False):
    """One message of a conversation."""

    role: Required[
        Literal["system", "developer", "user", "assistant", "tool", "function", "ipython"]
    ]
    content: str | Sequence[str | Mapping[str, object]] | None
    reasoning_content: str | None
    name: str | None
    tool_call_id: str | None
    tool_calls: Sequence[Mapping[str, object]] | None


# A dict with these keys, one with the fields of another API, such as openai's parameter types, or a
# message of an answer.
MessageInput: TypeAlias = MessageFields | Mapping[str, object] | BaseModel


class TurnFields(TypedDict, total=False):
    """Options of a request that is a turn of a session."""

    wait: bool
    edit: bool


class JobFields(TypedDict, total=False):
    """Options of the job: its queueing, and values that are recorded with its result."""

    id: str | None
    run: str | None
    row: int | None
    repeat: int | None
    custom_id: str | None
    target: str | None
    tenant: str | None
    delay: float | timedelta | None
    at: datetime | str | None
    session: str | None
    turn: TurnFields | BaseModel | None
    priority: Literal["interactive", "bulk"]
    ttl: float | None
    result_ttl: int | None
    retries: int | None
    tags: Sequence[str] | None
    via: Sequence[str] | None


class _OpenAIOptions(TypedDict, total=False):
    """The optional fields of OpenAI's chat completions that have an effect."""

    frequency_penalty: float | None
    logit_bias: Mapping[str, float] | Mapping[int, float] | None
    logprobs: bool | None
    max_completion_tokens: int | None
    max_tokens: int | None
    metadata: Mapping[str, str] | None
    n: int | None
    parallel_tool_calls: bool | None
    presence_penalty: float | None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None
    response_format: Mapping[str, object] | BaseModel | None
    seed: int | None
    stop: str | Sequence[str] | None
    store: bool | None
    stream_options: Mapping[str, object] | BaseModel | None
    temperature: float | None
    tool_choice: str | Mapping[str, object] | None
    tools: Iterable[Mapping[str, object] | BaseModel] | None
    top_logprobs: int | None
    top_p: float | None
    user: str | None


class SessionFields(_OpenAIOptions, total=False):
    """The fields of a request that all turns of a conversation may share."""

    add_generation_prompt: bool | None
    add_special_tokens: bool | None
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    cache_salt: str | None
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool | None
    documents: Sequence[Mapping[str, Any]] | None
    enable_thinking: bool | None
    guided_choice: Sequence[str] | None
    guided_grammar: str | None
    guided_json: Mapping[str, Any] | str | None
    guided_regex: str | None
    ignore_eos: bool | None
    include_stop_str_in_output: bool | None
    min_p: float | None
    prompt_logprobs: int | None
    min_tokens: int | None
    repetition_penalty: float | None
    return_token_ids: bool | None
    separate_reasoning: bool | None
    skip_special_tokens: bool | None
    stop_token_ids: Sequence[int] | None
    stream: bool | None
    structural_tag: Mapping[str, Any] | str | None
    structured_outputs: Mapping[str, Any] | BaseModel | None
    thinking_token_budget: int | None
    top_k: int | None
    truncate: Literal["oldest"] | None
    truncate_prompt_tokens: int | None


class SessionTurnFields(SessionFields, total=False):
    """The fields of a request that one turn of a conversation may have."""

    job: JobFields | BaseModel
    request_id: str | None


class _Conversation(TypedDict):
    model: str
    messages: Iterable[MessageInput]


class RequestFields(_Conversation, SessionTurnFields, total=False):
    """All fields of a `ChatRequest`: the type of a request as a plain dict."""

    apply_chat_template: bool | None
    prompt_token_ids: list[int] | None


class ScoreFields(TypedDict, total=False):
    """All fields of a `ScoreRequest`: the type of a scoring request as a plain dict. An item is an
    object as docs/score-jobs.md describes it, or one of the classes of items."""

    model: Required[str]
    items: Required[Iterable[Mapping[str, object] | BaseModel]]
    token_logprobs: bool
    truncate: Literal["left"] | None
    max_length: int | None
    messages_as_text: bool
    chat_template_kwargs: Mapping[str, Any] | None
    add_special_tokens: bool
    prefix_token_id: int | None
    cache_salt: str | None
    job: JobFields | BaseModel


class HTTPTimeout(Protocol):
    """openai.Timeout, or httpx.Timeout: of its limits, `read` has a meaning here."""

    read: float | None


class CompletionFields(_Conversation, _OpenAIOptions, total=False):
    """The arguments of openai's `chat.completions.create`, except `stream`.

    Those of type `object` have no effect here: `ChatRequest` ignores or refuses them.
    """

    audio: object
    function_call: object
    functions: object
    modalities: object
    moderation: object
    prediction: object
    prompt_cache_key: object
    prompt_cache_options: object
    prompt_cache_retention: object
    safety_identifier: object
    service_tier: object
    verbosity: object
    web_search_options: object
    extra_headers: Mapping[str, object] | None
    extra_query: Mapping[str, object] | None
    extra_body: Mapping[str, Any] | None
    timeout: float | HTTPTimeout | None
