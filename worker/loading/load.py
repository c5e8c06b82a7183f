"""Loads a model: from its reference to everything that an engine needs."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from jobs.api.request import ChatRequest
from jobs.errors import JobError, invalid
from worker.backend import ModelInfo
from worker.checkpoint import weights
from worker.checkpoint.config import GenerationDefaults, ModelConfig
from worker.checkpoint.headers import Checkpoint
from worker.checkpoint.source import ModelSource
from worker.checkpoint.tokenizer import Tokenizer
from worker.constraints.constraint import Constraint
from worker.constraints.grammars import ANSWER, Grammars, of_request
from worker.constraints.reasoning import Thinking, by_harmony, by_tags, literal
from worker.constraints.thinking_budget import FIELD, ThinkingBudget
from worker.constraints.vocabulary import grammar_vocabulary
from worker.device import Device, device_name, is_out_of_memory
from worker.layers.shard import WHOLE, Shard
from worker.layers.transfer import is_accelerator
from worker.layers.weights.compression import compression_of
from worker.layers.weights.storage import ProductKind
from worker.loading.description import describe
from worker.loading.find import find
from worker.loading.host_memory import CopiedCheckpoint, HostMemory, Kept, Stamps, stamps_of
from worker.loading.preflight import Preflight, preflight
from worker.loading.tool_syntax import parser_maker, tool_syntax
from worker.model_spec import ModelSpec
from worker.models.model import Model, Placement
from worker.models.registry import FAMILIES
from worker.processes.memory_limit import address_space_advice
from worker.prompt.builder import Prompt, PromptBuilder
from worker.prompt.published import document_of
from worker.prompt.request_template import RequestTemplates
from worker.prompt.template import ChatTemplate, chat_obstacle
from worker.text.answer_reader import AnswerReader
from worker.text.harmony import FINAL, HarmonySplitter, writes_harmony
from worker.text.reasoning import ReasoningSplitter, ReasoningTags, Splitter, reasoning_tags

logger = logging.getLogger(__name__)

StateFacts = tuple[str, str, tuple[int, ...]]

MAX_CONTEXT = 10_000_000  # several times the largest published context
SEARCH_SECONDS = 20.0  # limit of the search for a non-finite weight, which stalls the batch


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights on the device, its tokenizer, chat template and defaults."""

    info: ModelInfo
    source: ModelSource
    model: Model
    device: torch.device
    dtype: torch.dtype  # of the computation
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: GenerationDefaults
    tags: ReasoningTags | None
    tool_syntax: str | None  # of the calls in answers
    harmony: bool  # completions are in the harmony format
    bos: str  # with which prompts begin even if the template doesn't write it; "" if none
    files: Stamps  # that it was read from
    of_requests: RequestTemplates | None  # None: requests bring no chat template

    @property
    def chat_obstacle(self) -> str | None:
        """The reason for which chat requests fail, with the remedy; None if they don't."""
        return chat_obstacle(self.template)

    def prompts(self, context: int) -> PromptBuilder:
        hides_tools = self.tool_syntax is not None
        return PromptBuilder(
            self.info.name,
            self.tokenizer,
            self.template,
            context,
            hides_tools=hides_tools,
            bos=self.bos,
            of_requests=self.of_requests,
        )

    def prompt_document(self) -> bytes:
        """All that makes prompts of requests, for others."""
        return document_of(
            self.tokenizer,
            self.template,
            self.source.special_tokens,
            hides_tools=self.tool_syntax is not None,
            bos=self.bos,
        )

    @cached_property
    def prefix_token_id(self) -> int | None:
        """The token before a text without a prompt."""
        return prefix_token_id(self.source, self.tokenizer, self.defaults)

    def reader_maker(self, request: ChatRequest, prompt: Prompt) -> Callable[[], AnswerReader]:
        """Makes readers for the completions of a request."""
        if prompt.plain:
            return AnswerReader
        make_parser = parser_maker(self.tool_syntax, request)
        if request.separate_reasoning is False:
            return lambda: AnswerReader(parser=make_parser())
        return lambda: AnswerReader(self._splitter(prompt), make_parser())

    def _splitter(self, prompt: Prompt) -> Splitter | None:
        """Finds the reasoning of a completion; None if there is none."""
        if prompt.plain:
            return None
        if self.harmony:
            return HarmonySplitter(prompt.text)
        tags = self.tags
        return None if tags is None else ReasoningSplitter(tags, inside=_inside(tags, prompt))

    @cached_property
    def _grammars(self) -> Grammars:
        ends, size = self.defaults.eos_token_ids, self.model.vocab_size
        make_vocabulary = partial(grammar_vocabulary, self.tokenizer, size, ends)
        return Grammars(make_vocabulary, ends, self.info.reference)

    def constraint(self, request: ChatRequest, prompt: Prompt) -> Constraint | None:
        """What restricts the tokens of the completion of a request; None if they may be any. Raises
        InvalidRequest."""
        budget = self._budget(request.thinking_token_budget, prompt)
        wanted = of_request(request, self.tool_syntax, literal(self.tokenizer))
        if wanted is None:
            return None if budget is None else Constraint(budget=budget)
        (parts, form), thinking, compile = wanted, self._thinking(prompt), self._grammars.compile
        grammar = compile(thinking.before(ANSWER) + parts, form)
        if budget is None:
            return Constraint(grammar)
        return Constraint(grammar, budget, compile(thinking.ended_before(ANSWER) + parts, form))

    def _budget(self, most: int | None, prompt: Prompt) -> ThinkingBudget | None:
        """The budget of the reasoning of a completion. Raises InvalidRequest."""
        if most is None or prompt.plain:
            return None
        splitter = self._splitter(prompt)
        if splitter is None:
            raise invalid(
                f"{FIELD}: model {self.info.name} has no mark that ends its thinking, such as "
                f"</think>: remove it",
                FIELD,
            )
        mark = FINAL if self.tags is None or self.harmony else self.tags.closing
        ids = self.tokenizer.encode(mark, add_special_tokens=False)
        return ThinkingBudget(most, tuple(ids), splitter, self._text_of)

    def _text_of(self, token_id: int) -> str:
        return self.tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")

    def _thinking(self, prompt: Prompt) -> Thinking:
        """What may precede the answer, as `reader_maker` finds it."""
        tags = self.tags
        if prompt.plain or not (self.harmony or tags):
            return Thinking()
        if self.harmony:
            return by_harmony(self.tokenizer, prompt.text)
        assert tags is not None
        if prompt.text.rstrip().endswith(tags.closing):  # the template has ended it
            return Thinking()
        return by_tags(tags, self.tokenizer, inside=_inside(tags, prompt))

    def state_of(self, prompt_length: int) -> StateFacts:
        """The values that prompts must share to reuse the state of each other: model, dtype and
        rotation."""
        return self._identity, self.info.dtype, self.model.rotation(prompt_length)

    @cached_property
    def _identity(self) -> str:
        """A hash of weights and configuration: state in files outlives the process."""
        config = json.dumps(self.source.config.fields.values, sort_keys=True, default=str)
        return hashlib.sha256(f"{self.info.fingerprint} {config}".encode()).hexdigest()[:32]

    def not_finite(self, tokens: int) -> JobError:
        """The error for non-finite logits, naming the non-finite weight if there is one."""
        fact = f"the model's logits are not finite after {tokens} tokens"
        return JobError("internal", f"{fact}: {self._non_finite_cause}")

    @cached_property
    def _non_finite_cause(self) -> str:
        try:
            with self.source.weights() as checkpoint:
                return weights.find_non_finite(checkpoint, self.dtype, SEARCH_SECONDS)
        except JobError as error:
            return error.message


def _inside(tags: ReasoningTags, prompt: Prompt) -> bool:
    """True if a completion begins within the reasoning."""
    return prompt.text.rstrip().endswith(tags.opening) or tags.left_open(prompt.continued)


HostModels = HostMemory[LoadedModel]


def build_model(config: ModelConfig, tied: bool, place: Placement, weights_of: Checkpoint) -> Model:
    """A model with the weights of a checkpoint that preflight has checked; of several ranks, the
    part of one. Raises JobError."""
    model = FAMILIES[config.model_type](config.fields, tied, place)
    weights.load(model.weight_map(), weights_of, config.quantization)
    return model


def load(
    spec: ModelSpec,
    device: Device,
    host: HostModels | None = None,
    split: Callable[[Preflight], Shard] | None = None,
) -> LoadedModel:
    """Check everything that can be checked, then read the weights. A model that `host` has is not
    read again. `split`: called after the checks; returns the part that is read. Raises JobError."""
    kept = None if host is None else host.take(spec)
    if kept is not None:
        logger.info("%s comes from host memory", spec.reference)
        return kept.restore()
    compression = compression_of(spec.quantize)
    source = find(spec.reference, spec.download_dir)
    described = describe(source, spec.chat_template)
    template = described.template
    syntax = tool_syntax(template, spec.tool_parser, spec.reference)
    bos = bos_of(source, described.tokenizer, spec.add_bos)
    if source.needs_download:
        preflight(described, spec, device, source.headers()).require_room()
        source.download_weights()
    with source.weights() as checkpoint:
        checked = preflight(described, spec, device, checkpoint)
        checked.require_room()
        if checked.how is not None:
            logger.info("%s: %s", spec.reference, checked.how)
        if checked.slow is not None:
            logger.warning("%s: slow, because %s", spec.reference, checked.slow)
        files = stamps_of(_files_of(source, spec, checkpoint))

        place = Placement(
            checked.dtype,
            device.torch,
            compression.apply if compression else None,
            keep_quantised=spec.keep_quantised,
            shard=split(checked) if split else WHOLE,
        )
        build = partial(build_model, described.config, checked.tied, place)

        copied = None
        nbytes = sum(one.end - one.begin for one in checkpoint.tensors.values())
        if host is not None and is_accelerator(device.torch) and host.make_room(nbytes):
            copied = CopiedCheckpoint(checkpoint)
        first = build(copied or checkpoint)
        fingerprint = _fingerprint(checkpoint.fingerprint(), checked)

    def loaded(model: Model) -> LoadedModel:
        return LoadedModel(
            info=_info(checked, fingerprint, spec),
            source=source,
            model=model,
            device=device.torch,
            dtype=checked.dtype,
            tokenizer=checked.tokenizer,
            template=template,
            defaults=described.defaults,
            tags=reasoning_tags(checked.tokenizer, template.source) if template else None,
            tool_syntax=syntax,
            harmony=writes_harmony(checked.tokenizer),
            bos=bos,
            files=files,
            of_requests=(
                RequestTemplates(source.special_tokens)
                if spec.trust_request_chat_template
                else None
            ),
        )

    if host is not None and copied is not None:
        again = partial(_again, loaded, build, copied)
        host.keep(spec, Kept(source.name, again, nbytes, files, stays=True))
    return loaded(first)


def keep(
    spec: ModelSpec, model: LoadedModel, host: HostModels, coming_back: ModelSpec | None
) -> None:
    """Keep a model that leaves the CPU as it is, if there is room; see `HostMemory.make_room`."""
    nbytes = model.info.weight_bytes
    if not is_accelerator(model.device) and host.make_room(nbytes, coming_back):
        model.model.forget_steps()
        host.keep(spec, Kept(model.info.name, lambda: model, nbytes, model.files, stays=False))


def _again(
    loaded: Callable[[Model], LoadedModel],
    build: Callable[[Checkpoint], Model],
    weights_of: Checkpoint,
) -> LoadedModel:
    return loaded(build(weights_of))


def _files_of(source: ModelSource, spec: ModelSpec, checkpoint: Checkpoint) -> set[Path]:
    """The files that a model is read from. Of a model of the hub, also those that name its
    revision."""
    path = source.path
    files = {header.file for header in checkpoint.tensors.values()}
    files |= {one for one in path.iterdir() if one.is_file()} if path.is_dir() else {path}
    if spec.chat_template is not None:
        files.add(spec.chat_template)
    snapshots = (path if path.is_dir() else path.parent).parent
    if snapshots.name == "snapshots":
        files |= {one for one in (snapshots.parent / "refs").rglob("*") if one.is_file()}
    return files


def fetch(spec: ModelSpec) -> None:
    """Download the weights of a hub model, unless they are here. Raises JobError."""
    source = find(spec.reference, spec.download_dir)
    if source.needs_download:
        source.download_weights()


def bos_of(source: ModelSource, tokenizer: Tokenizer, wanted: bool | None) -> str:
    """The token with which prompts begin; `wanted`: what the user says, else the model decides."""
    token = source.special_tokens.get("bos_token", "")
    known = bool(token) and len(tokenizer.encode(token)) == 1
    if wanted and not known:
        raise invalid(
            f"add_bos: the tokenizer of {source.reference} has no BOS token: leave the option out",
            "add_bos",
        )
    return token if known and (source.adds_bos if wanted is None else wanted) else ""


def prefix_token_id(
    source: ModelSource, tokenizer: Tokenizer, defaults: GenerationDefaults
) -> int | None:
    """The token before a text without a prompt: BOS, else EOS; None if there is neither."""
    named = (source.special_tokens.get(name, "") for name in ("bos_token", "eos_token"))
    known = (tokenizer.id_of(token) for token in named if token)
    found = next((one for one in known if one is not None), None)
    return min(defaults.eos_token_ids, default=None) if found is None else found


@contextmanager
def memory_named(reference: str, device: Device) -> Iterator[None]:
    """A context for loading a model: raises JobError("out_of_memory") if there is no memory for
    it."""
    try:
        yield
    except BaseException as error:
        if not is_out_of_memory(error):
            raise
        cause = (str(error).splitlines() or ["no memory"])[0] or "no memory"
        raise JobError(
            "out_of_memory",
            f"{reference} can't be loaded: there is too little memory on {device.torch} ({cause}): "
            f"use a smaller model or another dtype{address_space_advice()}",
        ) from None


def _fingerprint(of_files: str, checked: Preflight) -> str:
    """Of the values of the weights: those of the files, unless some are re-encoded."""
    if checked.reencoded is None:
        return of_files
    changed = f"{of_files} {checked.reencoded}: {ProductKind.REENCODED.value}"
    return hashlib.sha256(changed.encode()).hexdigest()[:32]


def _info(checked: Preflight, fingerprint: str, spec: ModelSpec) -> ModelInfo:
    source, template = checked.model.source, checked.model.template
    return ModelInfo(
        name=source.name,
        reference=source.reference,
        revision=source.revision,
        family=checked.model.config.model_type,
        parameters=checked.parameters,
        weight_bytes=checked.weight_bytes,
        dtype=checked.formats,
        device=str(checked.device),
        device_name=device_name(checked.device),
        context_length=checked.context_length,
        fingerprint=fingerprint,
        tokenizer_hash=checked.tokenizer.hash,
        template_hash=template.hash if template else None,
        engine="chatjobs",
        engine_version=_version(),
        torch_version=torch.__version__,
        cuda_version=torch.version.cuda,
        takes_templates=spec.trust_request_chat_template,
    )


def _version() -> str:
    try:
        return version("chatjobs")
    except PackageNotFoundError:
        return "0"


def check_context(context: int, loaded: LoadedModel) -> None:
    """Refuse a context beyond a stretch that the config states; warn beyond plain positions."""
    model = loaded.model
    most = model.context_length if model.stretched else MAX_CONTEXT
    if not 1 < context <= most:
        raise invalid(f"context must be 2 to {most} for this model, got {context}", "context")
    if context > model.context_length:
        logger.warning(
            "%s: context %d exceeds the %d positions of its config.json: answers may degrade "
            "beyond them, unless rope_scaling in config.json stretches the positions",
            loaded.info.reference,
            context,
            model.context_length,
        )
