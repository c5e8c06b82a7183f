"""Sampling parameters of a request, by the names that OpenAI and vLLM use."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, StrictBool, StrictInt, model_validator

from jobs.api.wire import Checked, Number, Text, kind_of


class Sampling(Checked):
    """How tokens are chosen and when a completion ends.

    None means: the model's generation_config.json decides, then OpenAI's default. Penalties look at
    the last 64 tokens for `repetition_penalty` (prompt included) and at the whole completion for
    presence and frequency.
    """

    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1)] | None = None  # 0 and -1: off
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None  # id as text
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[Annotated[StrictInt, Field(ge=0)]] | None = None
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    min_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    ignore_eos: StrictBool | None = None
    n: Annotated[StrictInt, Field(ge=1, le=128)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _bias_keys(cls, data: Any) -> Any:
        """Python users may give token ids as ints; JSON has only strings."""
        if isinstance(data, dict) and isinstance(data.get("logit_bias"), dict):
            bias = {str(key): value for key, value in data["logit_bias"].items()}
            return {**data, "logit_bias": bias}
        return data

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if "" in self.stop_strings:
            raise ValueError("stop: a stop string can't be empty")
        for key in self.logit_bias or {}:
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise ValueError(f"logit_bias: keys are token ids, got {kind_of(key)}")
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
