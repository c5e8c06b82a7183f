"""A chat-completion request: OpenAI's fields, vLLM's extensions, and `job` for the queue."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    model_validator,
)

from jobs.api.caller import warn_caller
from jobs.api.chat_template import checked_template
from jobs.api.grammar import Grammar, check
from jobs.api.history import plain_messages
from jobs.api.job_options import JobOptions
from jobs.api.json_values import as_list, check_json
from jobs.api.message import Message
from jobs.api.sampling import Sampling
from jobs.api.structured import (
    FORMER_NAMES,
    ResponseFormat,
    StructuredOutputs,
    merge_structured,
)
from jobs.api.tool_choice import Forced, check_tool_choice, forced_tools
from jobs.api.unsupported_fields import (
    IGNORED_IN_TOOL,
    drop_ignored,
    drop_stream_options,
    drop_unsupported,
)
from jobs.api.wire import Text, Wire, describe
from jobs.errors import invalid
from jobs.keys import JOB_ID

if TYPE_CHECKING:
    from typing import Unpack

    from jobs.api.params import RequestFields

MAX_NAME = 1000  # characters of a model's name
MAX_TOOLS = 1024
# The fields that only a chat template reads.
TEMPLATE_INPUTS = (
    *("tools", "documents", "chat_template", "chat_template_kwargs", "enable_thinking"),
    *("reasoning_effort", "add_generation_prompt", "continue_final_message"),
)
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # characters of the category Cc
# OpenAI takes up to 64 characters and no dot; others take longer names with dots.
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def _model_name(name: str) -> str:
    """A name that a model can have; a job for another name would wait forever."""
    if len(name) > MAX_NAME:
        raise ValueError(f"a name has at most {MAX_NAME} characters, got {len(name)}")
    if name != name.strip():
        raise ValueError(f"{describe(name)} begins or ends with a space: remove it")
    if CONTROL.search(name):
        raise ValueError(f"{describe(name)} contains a control character: remove it")
    return name


ModelName = Annotated[Text, Field(min_length=1), AfterValidator(_model_name)]


def _tool_name(name: str) -> str:
    if not TOOL_NAME.fullmatch(name):
        fact = "must have 1 to 128 letters (a-z), digits, '_', '-' and '.'"
        raise ValueError(f"{fact}, got {describe(name)}")
    return name


class StreamOptions(Wire):
    include_usage: StrictBool = False


class FunctionDefinition(Wire):
    model_config = ConfigDict(extra="allow")
    name: Annotated[Text, AfterValidator(_tool_name)]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(Wire):
    type: Literal["function"]
    function: FunctionDefinition


def _distinct(tools: list[Tool]) -> list[Tool]:
    if len(tools) > MAX_TOOLS:
        raise ValueError(f"a request has at most {MAX_TOOLS} tools, got {len(tools)}")
    names: set[str] = set()
    for tool in tools:
        if tool.function.name in names:
            raise ValueError(f"two tools have the name {describe(tool.function.name)}: rename one")
        names.add(tool.function.name)
    return tools


class IgnoredFieldWarning(UserWarning):
    """A field of another API was given that has no effect."""


class ChatRequest(Sampling):
    """One chat completion to run.

        ChatRequest(model="demo", messages=[{"role": "user", "content": "Hi"}], temperature=0)

    Raises InvalidRequest, naming the field, if a value is invalid. All fields but `model` and
    `messages` are optional. docs/requests.md describes each of them.

    The conversation:
        model                     a name that a worker serves
        messages                  dicts with role and content, as in OpenAI's API
        tools, tool_choice        functions that the model may call, or must
        parallel_tool_calls       False: a required call is the only one

    Sampling; by default as the model's generation_config.json says, else as OpenAI's API:
        temperature, top_p, top_k, min_p, seed
        repetition_penalty, presence_penalty, frequency_penalty
        logit_bias, bad_words, allowed_token_ids

    The end of the answer:
        max_tokens, max_completion_tokens, min_tokens
        thinking_token_budget     tokens of reasoning, after which its end is forced
        stop, stop_token_ids, include_stop_str_in_output, ignore_eos

    What is returned:
        n                         number of answers
        logprobs, top_logprobs    log-probabilities of the tokens
        prompt_logprobs           log-probabilities of the prompt's tokens, without stream
        return_token_ids          token ids of the prompt and of the answers
        skip_special_tokens
        response_format, structured_outputs  the form of the answer: JSON, a regular expression, …
        separate_reasoning        False: the reasoning stays in the content, with its tags
        stream                    publish the tokens as they are generated
        stream_options            {"include_usage": True}: end the stream with the token counts

    The prompt:
        documents                 texts with titles, for the chat template
        chat_template             in place of the model's, if the worker takes one
        chat_template_kwargs, enable_thinking, reasoning_effort
        apply_chat_template       False: the text of the messages is the prompt as it is
        prompt_token_ids          the prompt as token ids, in place of the messages' text
        add_special_tokens        whether it begins with the tokenizer's special tokens
        add_generation_prompt, continue_final_message, truncate_prompt_tokens
        truncate                  "oldest": drop the oldest turns that the context has no room for
        cache_salt                state is reused only among prompts with equal ones

    The job:
        job                       id, run, row, repeat, custom_id, target, session, turn, priority,
                                  tenant, delay, at, ttl, retries, result_ttl, tags,
                                  via
        user, metadata            kept with the request
        store                     false: the row has neither the prompt nor the answer
    """

    # Names that a user may give for other fields.
    other_names: ClassVar[tuple[str, ...]] = ("request_id", *FORMER_NAMES)

    model: ModelName
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    tools: Annotated[list[Tool], AfterValidator(_distinct)] | None = None
    tool_choice: Text | dict[str, Any] | None = None
    return_token_ids: StrictBool | None = None  # in completion and chunks
    parallel_tool_calls: StrictBool | None = None  # false: a required call is the only one
    stream: StrictBool | None = None  # None: interactive jobs stream, bulk jobs don't
    stream_options: StreamOptions | None = None
    user: Text | None = None
    metadata: dict[Text, Text] | None = None
    store: StrictBool | None = None  # false: the row has neither the prompt nor the answer
    apply_chat_template: StrictBool | None = None  # false: the text of the messages is the prompt
    prompt_token_ids: Annotated[list[StrictInt], Field(min_length=1)] | None = None  # the prompt
    add_special_tokens: StrictBool | None = None  # None: only without the chat template
    documents: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    chat_template: Annotated[Text, AfterValidator(checked_template)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: StrictBool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    separate_reasoning: StrictBool | None = None  # None: true
    add_generation_prompt: StrictBool | None = None  # None: unless continue_final_message
    continue_final_message: StrictBool | None = None
    truncate_prompt_tokens: Annotated[StrictInt, Field(ge=-1)] | None = None  # -1: to the context
    truncate: Literal["oldest"] | None = None
    prompt_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    cache_salt: Annotated[Text, Field(min_length=1)] | None = None
    job: JobOptions = Field(default_factory=JobOptions)

    if TYPE_CHECKING:

        def __init__(self, **fields: Unpack[RequestFields]) -> None: ...

    @model_validator(mode="before")
    @classmethod
    def _take_other_forms(cls, data: Any) -> Any:
        """Take the request as clients of OpenAI, vLLM and litellm send it."""
        if not isinstance(data, dict):
            return data
        data = {name: as_list(value) for name, value in data.items()}
        for name, value in data.items():
            check_json(value, str(name))
        ignored: list[str] = []
        data = merge_structured(drop_unsupported(data, ignored))
        if "messages" in data:
            data["messages"] = plain_messages(data["messages"], ignored)
        if isinstance(data.get("tools"), list | tuple):
            data["tools"] = [
                drop_ignored(tool, IGNORED_IN_TOOL, f"tools[{number}]", ignored)
                if isinstance(tool, dict)
                else tool
                for number, tool in enumerate(data["tools"])
            ]
        if isinstance(data.get("stream_options"), dict):
            data["stream_options"] = drop_stream_options(data["stream_options"], ignored)
        _merge_request_id(data)
        if ignored:
            names = ", ".join(sorted(ignored))
            warn_caller(f"fields without effect are ignored: {names}", IgnoredFieldWarning)
        return data

    @model_validator(mode="after")
    def _merge_token_limits(self) -> Self:
        if self.max_completion_tokens is not None:
            if self.max_tokens is not None and self.max_tokens != self.max_completion_tokens:
                raise ValueError(
                    "max_tokens and max_completion_tokens differ: set only one "
                    f"(got {self.max_tokens} and {self.max_completion_tokens})"
                )
            self.max_tokens, self.max_completion_tokens = self.max_completion_tokens, None
        return self

    @model_validator(mode="after")
    def _check_prompt_fields(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError(
                "continue_final_message and add_generation_prompt exclude each other: set only one"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs: they are not streamed: set stream to false")
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens: must be at least 1, or -1 for the context")
        if self.truncate is not None and self.truncate_prompt_tokens is not None:
            raise ValueError("truncate and truncate_prompt_tokens exclude each other: set only one")
        return self

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        check_tool_choice(self.tool_choice, self._functions)
        form, forced = self.form, self.forced_tools
        if form is None and forced is None:
            return self
        if form is not None and forced is not None:
            raise invalid(
                f"{form.field} and tool_choice exclude each other: an answer has one form: set "
                "only one",
                form.field,
            )
        if self.ignore_eos:
            raise invalid("ignore_eos: an answer in a form ends with it: remove one", "ignore_eos")
        for one in (form,) if form is not None else (forced or ()):
            check(one if isinstance(one, Grammar) else one.arguments)
        return self

    @model_validator(mode="after")
    def _check_template_inputs(self) -> Self:
        if self.prompt_token_ids is not None:
            if self.apply_chat_template:
                raise ValueError(
                    "prompt_token_ids: they are the prompt as it is: remove apply_chat_template"
                )
            self.apply_chat_template = False
        if self.apply_chat_template is not False:
            return self
        if self.thinking_token_budget is not None:
            raise invalid(
                "thinking_token_budget: reasoning is known of chats alone, and apply_chat_template "
                "is false: remove one of them",
                "thinking_token_budget",
            )
        for name in TEMPLATE_INPUTS:
            if getattr(self, name):
                raise ValueError(
                    f"{name}: the chat template reads it, and apply_chat_template is false: remove "
                    "one of them"
                )
        if self.job.session is not None:
            raise ValueError("apply_chat_template: a session needs the chat template: remove it")
        return self

    @model_validator(mode="after")
    def _check_session(self) -> Self:
        if self.job.session is None:
            if self.job.turn is not None:
                raise ValueError("job.turn needs job.session")
            return self
        if (self.n or 1) > 1:
            raise ValueError(f"n: a turn of a session has one answer, got {self.n}")
        if self.continue_final_message:
            raise ValueError("continue_final_message is not possible in a session: remove it")
        return self

    @property
    def publishes(self) -> bool:
        """True if the job's tokens are published to Redis as they are generated."""
        return self.job.priority == "interactive" if self.stream is None else self.stream

    @property
    def form(self) -> Grammar | None:
        """What the answer must be; None: any text."""
        found = None if self.response_format is None else self.response_format.grammar
        if found is None and self.structured_outputs is not None:
            return self.structured_outputs.as_grammar
        return found

    @property
    def forced_tools(self) -> tuple[Forced, ...] | None:
        """The functions of which the answer must call one; None: it need not."""
        return forced_tools(self.tool_choice, self._functions)

    @property
    def _functions(self) -> list[FunctionDefinition]:
        return [tool.function for tool in self.tools or ()]

    def sampling(self) -> Sampling:
        """The sampling fields alone."""
        return Sampling(**{name: getattr(self, name) for name in Sampling.model_fields})


def _merge_request_id(data: dict[str, Any]) -> None:
    """vLLM's request_id is job.id here."""
    given, job = data.pop("request_id", None), data.get("job") or {}
    options = job.model_dump() if isinstance(job, JobOptions) else job
    if given is None or not isinstance(options, dict):
        return
    if options.get("id") not in (None, given):
        raise invalid("request_id and job.id differ: set only one", "request_id")
    if not (isinstance(given, str) and JOB_ID.fullmatch(given)):
        fact = f"must have only letters, digits, '_' and '-', got {describe(given)}"
        raise invalid(f"request_id: {fact}", "request_id")
    data["job"] = {**options, "id": given}
