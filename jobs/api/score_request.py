"""A scoring request: many items in one job, each with a row, a result and an error of its own.

An item is checked when it is scored, so that a bad one fails alone. `LogLikelihood`, `Choice` and
`Perplexity` are the items as Python objects, which check their fields when they are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, StrictBool, StrictInt, field_validator, model_validator

from jobs.api.job_options import JobOptions
from jobs.api.json_values import as_list, check_json
from jobs.api.message import Message
from jobs.api.request import ModelName
from jobs.api.row_keys import MAX_ROW, item_rows
from jobs.api.wire import Checked, Text, Wire, describe
from jobs.errors import invalid

if TYPE_CHECKING:
    from typing import Unpack

    from jobs.api.params import ScoreFields

MAX_ITEMS = 1000  # of one request
MAX_CONTINUATIONS = 1000  # of one item

# For the number of windows of a text whose tokens are not known.
TOKEN_CHARACTERS = 4
DEFAULT_WINDOW = 2048  # a context that many models have

TokenIds = list[StrictInt]


class ScoreItem(Checked):
    """The fields that all items have.

    custom_id   the user's own key, copied to the row
    row         row_index in the run; by default `job.row` and the place in `items`
    repeat      repeat_index, for rows that are scored several times
    target      the expected answer, copied to the row
    metadata    a JSON object that is copied to the row
    """

    custom_id: Text | None = None
    row: Annotated[StrictInt, Field(ge=0, lt=MAX_ROW)] | None = None
    repeat: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = None
    target: Text | None = None
    metadata: dict[str, Any] | None = None


class PromptedItem(ScoreItem):
    """An item that scores continuations of a prompt: a text or token ids as they are, or messages,
    which the model's chat template renders.

    continue_final_message   the last message stays open, and the continuations go on with it
    delimiter                the text that continuations begin with, to be separated from the
                             prompt: its bytes are not counted
    """

    prompt: Text | TokenIds | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    continue_final_message: StrictBool | None = None
    delimiter: Text | None = None

    @model_validator(mode="after")
    def _check_prompt(self) -> PromptedItem:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: set either prompt or messages")
        if self.continue_final_message and self.messages is None:
            raise ValueError("continue_final_message: a prompt has no messages: remove it")
        return self


Continuations = Annotated[list[Text | TokenIds], Field(min_length=1, max_length=MAX_CONTINUATIONS)]


def _not_empty(continuations: list[str | list[int]]) -> list[str | list[int]]:
    for number, one in enumerate(continuations):
        if not one:
            raise ValueError(f"number {number} is empty: there is nothing to score")
    return continuations


class LogLikelihood(PromptedItem):
    """Scores each of `continuations` after the prompt: log-probabilities, and whether they are what
    greedy decoding would generate."""

    type: Literal["loglikelihood"] = "loglikelihood"
    continuations: Annotated[Continuations, AfterValidator(_not_empty)]


class Choice(PromptedItem):
    """Picks the one of `choices` with the highest log-likelihood after the prompt: the sum, or the
    sum divided by the number of tokens or of UTF-8 bytes, without the delimiter."""

    type: Literal["choice"] = "choice"
    choices: Annotated[Continuations, AfterValidator(_not_empty)]
    normalize: Literal["none", "tokens", "bytes"] = "none"


class Perplexity(ScoreItem):
    """Scores all tokens of a long text, in windows.

    window   tokens that the model sees at once; by default its context
    stride   tokens that each further window scores; by default `window`
    prefix   false: the first token of the text is context and isn't scored. By default the first
             window begins with the prefix token
    """

    type: Literal["perplexity"] = "perplexity"
    text: Text | TokenIds
    window: Annotated[StrictInt, Field(ge=1)] | None = None
    stride: Annotated[StrictInt, Field(ge=1)] | None = None
    prefix: StrictBool = True

    @model_validator(mode="after")
    def _check_windows(self) -> Perplexity:
        if self.window is not None and self.stride is not None and self.stride > self.window:
            raise ValueError(f"stride: at most the window, {self.window}, got {self.stride}")
        return self


Item = LogLikelihood | Choice | Perplexity
ITEM_TYPES: dict[str, type[Item]] = {
    "loglikelihood": LogLikelihood,
    "choice": Choice,
    "perplexity": Perplexity,
}


def parse_item(value: Any) -> Item:
    """One item, checked. Raises InvalidRequest."""
    if not isinstance(value, Mapping):
        raise invalid(f"an item must be a JSON object, got {describe(value)}")
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in ITEM_TYPES:
        names = ", ".join(ITEM_TYPES)
        raise invalid(f"type: must be one of {names}, got {describe(kind)}", "type")
    return ITEM_TYPES[kind].parse(value)


class ScoreRequest(Checked):
    """Scores items with one model, many in one job.

        ScoreRequest(model="demo", items=[
            {"type": "loglikelihood", "prompt": "2+2=", "continuations": ["4", "5"]},
        ])

    Raises InvalidRequest, naming the field, if a value is invalid; a bad item becomes an error of
    that item. docs/score-jobs.md describes each field.

        model               a name that a worker serves
        items               objects with a type, or LogLikelihood, Choice and Perplexity
        token_logprobs      false: results have sums only
        truncate            "left": a prompt that is too long loses its beginning
        max_length          tokens that the model sees at once; by default its context
        messages_as_text    true: rendered messages are split as any text
        chat_template_kwargs  variables of the chat template
        add_special_tokens  whether texts begin with the tokenizer's special tokens; by default yes
        prefix_token_id     stands for an empty prompt; by default BOS, else EOS
        cache_salt          state is reused only among prompts with equal ones
        job                 id, run, row, priority, tenant, delay, at, ttl, retries, result_ttl,
                            tags
    """

    model: ModelName
    items: Annotated[list[Any], Field(min_length=1, max_length=MAX_ITEMS)]
    token_logprobs: StrictBool = True
    truncate: Literal["left"] | None = None
    max_length: Annotated[StrictInt, Field(ge=1)] | None = None
    messages_as_text: StrictBool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: StrictBool = True
    prefix_token_id: Annotated[StrictInt, Field(ge=0)] | None = None
    cache_salt: Annotated[Text, Field(min_length=1)] | None = None
    job: JobOptions = Field(default_factory=JobOptions)

    if TYPE_CHECKING:

        def __init__(self, **fields: Unpack[ScoreFields]) -> None: ...

    @field_validator("items", mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        """The items as JSON values."""
        value = as_list(value)
        if not isinstance(value, list | tuple):
            return value
        items = [one.to_dict() if isinstance(one, Wire) else one for one in value]
        for number, one in enumerate(items):
            check_json(one, f"items[{number}]")
        return items

    @model_validator(mode="after")
    def _check_job(self) -> ScoreRequest:
        for name in ("custom_id", "target", "repeat"):
            if getattr(self.job, name) is not None:
                raise ValueError(f"job.{name}: each item has its own: set {name} of the items")
        if self.job.session is not None or self.job.turn is not None:
            raise ValueError("job.session: a scoring job is no turn of a session: remove it")
        self._check_rows()
        return self

    def _check_rows(self) -> None:
        first: dict[tuple[int, int], int] = {}
        for number, key in enumerate(item_rows("", self.job.row, self.items)):
            other = first.setdefault(key, number)
            if other != number:
                raise ValueError(
                    f"items: {other} and {number} have one row ({key[0]}, repeat {key[1]}): give "
                    "each its own row or repeat"
                )

    @property
    def publishes(self) -> bool:
        """False: a scoring job has no token stream."""
        return False

    @property
    def cost(self) -> int:
        """Number of sequences that it adds to the batch, about: one for each continuation and each
        window."""
        return sum(count_sequences(item, self.max_length) for item in self.items)


def count_sequences(item: Any, context: int | None = None) -> int:
    """Number of the sequences of an item, of any JSON value: its continuations, or about its
    windows. `context`: tokens that the model sees at once, if known. At least 1."""
    if not isinstance(item, Mapping):
        return 1
    found, text = item.get("continuations", item.get("choices")), item.get("text")
    if isinstance(found, list):
        return max(1, len(found))
    if not isinstance(text, str | list):
        return 1
    tokens = len(text) // TOKEN_CHARACTERS if isinstance(text, str) else len(text)
    window = _positive(item.get("window")) or context or DEFAULT_WINDOW
    return 1 + max(0, -(-(tokens - window) // (_positive(item.get("stride")) or window)))


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
