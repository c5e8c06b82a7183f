"""The file of `chatjobs work --config`: what a worker serves, as TOML.

worker-schema.json beside this module is its JSON schema. `chatjobs work` fills in what the file
leaves out with its own options.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StrictBool, StrictInt, StringConstraints

from jobs.api.wire import Checked, Text, Wire
from jobs.errors import JobError, invalid
from worker.cli.options import DEVICE
from worker.memory_amount import MemoryAmount
from worker.model_spec import ModelSpec
from worker.option_values import MOST_DRAFT_TOKENS, ToolParser
from worker.residency.policy import ResidencyPolicy, keep_alive_seconds


def _amount(text: str) -> str:
    try:
        MemoryAmount.parse(text)
    except JobError as error:
        raise ValueError(error.message) from None
    return text


def _keep_alive(value: float | str) -> float | str:
    try:
        keep_alive_seconds(value)
    except JobError as error:
        raise ValueError(error.message) from None
    return value


def _device(text: str) -> str:
    if not DEVICE.fullmatch(text):
        raise ValueError(f"{text!r} is not a device: auto, cpu, cuda or cuda:N")
    return text


# The options of a model that mean the same here and in its ModelSpec.
AS_THEY_ARE = (
    *("dtype", "quantize", "keep_quantised", "context", "max_batch", "prefix_cache", "draft"),
    *("draft_tokens", "trust_request_chat_template", "add_bos", "tool_parser"),
)
Name = Annotated[Text, StringConstraints(min_length=1)]
Amount = Annotated[
    Text, AfterValidator(_amount), Field(description="90%, 12GiB, 500MB, or a number of bytes")
]
Count = Annotated[StrictInt, Field(ge=1)]


class ModelEntry(Wire):
    """One model of a worker. Fields that are left out have the values of the command's options."""

    model: Name = Field(description="'demo', a folder, a GGUF file or a repository id")
    aliases: list[Name] = Field(default=[], description="further names that requests may use")
    pin: StrictBool = Field(
        default=False, description="always in memory: loaded at the start, never unloaded"
    )
    preload: StrictBool = Field(default=True, description="loaded at the start if there is room")
    keep_alive: Annotated[float | str, AfterValidator(_keep_alive)] = Field(
        default=-1,
        description="seconds without jobs, or '5m', after which it is unloaded; 0: at once, -1: "
        "when others need the memory",
    )
    dtype: Literal["auto", "bf16", "fp16", "fp32"] | None = None
    quantize: Literal["q8"] | None = None
    keep_quantised: StrictBool | None = None
    context: Count | None = Field(default=None, description="tokens of prompt and answer together")
    max_batch: Count | None = Field(default=None, description="sequences in the batch")
    cache: Amount | None = Field(default=None, description="memory of the KV cache; no percentage")
    prefix_cache: StrictBool | None = None
    draft: Name | None = Field(default=None, description="a smaller model, or ngram")
    draft_tokens: Annotated[StrictInt, Field(ge=1, le=MOST_DRAFT_TOKENS)] | None = None
    chat_template: Name | None = Field(default=None, description="a file with a Jinja template")
    trust_request_chat_template: StrictBool | None = Field(
        default=None, description="requests may bring a template of their own"
    )
    add_bos: StrictBool | None = None
    tool_parser: ToolParser | None = None
    prompt_caches: list[Name] | None = Field(
        default=None, description="files of `chatjobs prompts save`"
    )

    @property
    def policy(self) -> ResidencyPolicy:
        """How the model comes and goes."""
        return ResidencyPolicy(
            pin=self.pin, preload=self.preload, keep_alive=keep_alive_seconds(self.keep_alive)
        )

    def spec(self, defaults: ModelSpec, folder: Path) -> ModelSpec:
        """The options of the model. `defaults`: those of the command; `folder`: that of the file,
        from which relative paths of its files lead. Raises JobError("invalid_request")."""
        given: dict[str, Any] = {
            name: value for name in AS_THEY_ARE if (value := getattr(self, name)) is not None
        }
        if self.cache is not None:
            amount = MemoryAmount.parse(self.cache)
            if amount.nbytes is None:
                raise invalid(f"cache of {self.model}: give a size such as 2GiB", "models.cache")
            given["cache_bytes"] = amount.nbytes
        if self.chat_template is not None:
            given["chat_template"] = _file(folder / self.chat_template, "chat_template")
        if self.prompt_caches is not None:
            given["prompt_caches"] = tuple(
                _file(folder / one, "prompt_caches") for one in self.prompt_caches
            )
        options = {name: getattr(defaults, name) for name in ModelSpec.__slots__} | given
        return ModelSpec(**options | {"reference": self.model, "aliases": tuple(self.aliases)})


class WorkerConfig(Checked):
    """What a worker serves."""

    device: Annotated[Text, AfterValidator(_device)] | None = Field(
        default=None, description="auto, cpu, cuda or cuda:N"
    )
    memory: Amount | None = Field(
        default=None, description="that all models together may take: 90% of the device, 12GiB"
    )
    host_memory: Amount | None = Field(
        default=None,
        description="host memory in which unloaded models stay: 50% of the machine, 12GiB",
    )
    max_wait: Annotated[float, Field(ge=0)] | None = Field(
        default=None,
        description="seconds that a job waits for its model before models with waiting jobs make "
        "room",
    )
    models: Annotated[list[ModelEntry], Field(min_length=1)]


def read_config(path: Path) -> WorkerConfig:
    """Raises JobError("invalid_request"), which names the file."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise invalid(f"{path} cannot be read: {error.strerror}", "config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise invalid(f"{path} is not TOML: {error}", "config") from None
    try:
        return WorkerConfig.parse(found)
    except JobError as error:
        raise invalid(f"{path}: {error.message}", error.param) from None


def schema() -> str:
    """The JSON schema of the file."""
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "worker.toml"}
    return json.dumps(WorkerConfig.model_json_schema() | about, indent=2) + "\n"


def _file(path: Path, name: str) -> Path:
    if not path.is_file():
        raise invalid(f"{name}: no file {path}", f"models.{name}")
    return path
