"""Sampling parameters of a request, under the names of OpenAI and vLLM."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, StrictBool, StrictInt, model_validator

from jobs.api.wire import Checked, Number, Text, describe

BadWord = Annotated[Text, Field(min_length=1, max_length=256)]


class Sampling(Checked):
    """Sampling parameters and stop conditions of a completion.

    None stands for the value in the model's generation_config.json, else for OpenAI's default.
    `repetition_penalty` applies to the last 64 tokens, prompt included; `presence_penalty` and
    `frequency_penalty` apply to the whole completion.
    """

    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1)] | None = None  # 0 and -1: off
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None  # by token id
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[Annotated[StrictInt, Field(ge=0)]] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=1000)] | None = None
    allowed_token_ids: list[Annotated[StrictInt, Field(ge=0)]] | None = None
    include_stop_str_in_output: StrictBool | None = None  # also the text of a stop token
    skip_special_tokens: StrictBool | None = None  # None: true
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    min_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    thinking_token_budget: Annotated[StrictInt, Field(ge=0)] | None = None  # tokens of reasoning
    ignore_eos: StrictBool | None = None
    n: Annotated[StrictInt, Field(ge=1, le=128)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _stringify_token_ids(cls, data: Any) -> Any:
        """In Python, the token ids in logit_bias may be ints; JSON keys are strings."""
        if isinstance(data, dict) and isinstance(data.get("logit_bias"), dict):
            bias = {str(key): value for key, value in data["logit_bias"].items()}
            return {**data, "logit_bias": bias}
        return data

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs requires logprobs: true")
        if "" in self.stop_strings:
            raise ValueError("stop: a stop string can't be empty")
        if self.allowed_token_ids == []:
            raise ValueError("allowed_token_ids is empty: no token could be generated")
        for key in self.logit_bias or {}:
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise ValueError(f"logit_bias: keys must be token ids, got {describe(key)}")
        if self.min_tokens and self.max_tokens and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens {self.min_tokens} is greater than max_tokens {self.max_tokens}"
            )
        return self

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop
