"""Builds prompts: messages → token ids, with the model's own chat template."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jobs.api.chat_template import not_taken
from jobs.api.request import ChatRequest
from jobs.errors import JobError, invalid
from worker.backend import TooLong
from worker.checkpoint.tokenizer import Tokenizer
from worker.prompt.encoder import Around, PromptEncoder
from worker.prompt.request_template import RequestTemplates
from worker.prompt.template import NO_TEMPLATE, ChatTemplate
from worker.prompt.template_inputs import before_mark, messages_for, variables_for
from worker.prompt.trim_turns import answer_room, build_newest


@dataclass(frozen=True)
class Prompt:
    """A rendered request: its text and its token ids. `continued`: text of the last message, if the
    completion continues it. `plain`: the text is no conversation, and neither is the completion."""

    text: str
    token_ids: list[int]
    continued: str = ""
    plain: bool = False


class PromptBuilder:
    """Renders and tokenizes the requests of one model. Thread-safe.

    `hides_tools`: requests may have tools although the template ignores them, because the worker
    was told how the model writes calls; their messages then describe the tools. `bos`: the token
    with which prompts begin, whether or not the template writes it. `of_requests`: the templates
    that requests bring; None: they may bring none.
    """

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        context: int,
        *,
        hides_tools: bool = False,
        bos: str = "",
        of_requests: RequestTemplates | None = None,
    ) -> None:
        self._of_requests = of_requests
        self._model, self._template, self._context = model, template, context
        self._tokenizer, self._bos = tokenizer, bos
        self._hides_tools = hides_tools
        self._encoder = PromptEncoder(tokenizer, context)

    def build(self, request: ChatRequest) -> Prompt:
        """Render and tokenize a request. Raises JobError if it can't be rendered, asks for an
        unsupported feature, or exceeds the context."""
        if request.apply_chat_template is not False:
            self._template_of(request)
        if request.truncate == "oldest":
            return build_newest(
                request, self._build, lambda prompt: len(prompt.token_ids), self._context
            )
        try:
            return self._build(request)
        except JobError as error:
            if not request.job.session:
                raise
            raise in_session(error) from None

    def _build(self, request: ChatRequest) -> Prompt:
        """Render and tokenize all messages of a request."""
        plain = request.apply_chat_template is False
        if plain:
            text = "".join(message.text for message in request.messages)
        else:
            text = self.render(request)
        last = request.truncate_prompt_tokens
        if last is not None and last < 0:
            last = max(1, self._context - answer_room(request.max_tokens or 1, self._context))
        if request.prompt_token_ids is not None:
            return Prompt("", request.prompt_token_ids[-(last or 0) :], plain=True)
        special = request.add_special_tokens
        around = self._added if (plain if special is None else special) else None
        token_ids = self._encoder.encode(text, last, around)
        if not token_ids:
            source = "they are empty" if plain else "the chat template renders them as empty text"
            raise invalid(f"the prompt has no tokens: {source}", "messages")
        continued = request.messages[-1].text if request.continue_final_message else ""
        return Prompt(text, token_ids, continued, plain)

    def render(self, request: ChatRequest) -> str:
        """The text of all messages of a request. Raises JobError."""
        template = self._template_of(request)
        tools = None
        if request.tools and request.tool_choice != "none":
            if not (template.takes_tools or self._hides_tools):
                raise invalid(
                    f"tools are not supported: the chat template of model {self._model} ignores "
                    "them, so the model would not see them; remove them, or start the worker with "
                    "--chat-template FILE or --tool-parser NAME",
                    "tools",
                )
            tools = [tool.to_dict() for tool in request.tools]
        continued = bool(request.continue_final_message)
        text = template.render(
            messages_for(template, request),
            tools,
            variables_for(template, request),
            add_generation_prompt=request.add_generation_prompt is not False and not continued,
        )
        if continued:
            text = before_mark(text, request)
        return text if text.startswith(self._bos) else self._bos + text

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """Token ids of a text of any length. `special_tokens`: with those that the tokenizer or the
        model adds, unless the text begins with them. Raises JobError."""
        return self._encoder.encode_all(text, self._added if special_tokens else None)

    @cached_property
    def _added(self) -> Around:
        """The special tokens before and after a text."""
        before, after = self._tokenizer.added_around()
        return Around(before or self._tokenizer.encode(self._bos), after)

    def _template_of(self, request: ChatRequest) -> ChatTemplate:
        """The one that the request brings, or that of the model. Raises JobError."""
        if request.chat_template is not None:
            if self._of_requests is None:
                raise not_taken(self._model)
            return self._of_requests.of(request.chat_template)
        if self._template is None:
            raise JobError("unsupported_model", f"model {self._model} {NO_TEMPLATE}")
        return self._template

    def close(self) -> None:
        """End the process that tokenizes long prompts."""
        self._encoder.close()


def in_session(error: JobError) -> JobError:
    """The error of a request of a session; with what makes room, if its history is too long."""
    if error.code != "context_length_exceeded":
        return error
    hint = 'truncate="oldest" leaves out the oldest turns, and undo or reset removes some'
    message = f"{error.message}; {hint}"
    if isinstance(error, TooLong):
        return TooLong(message, error.param, error.tokens)
    return JobError(error.code, message, error.param)
