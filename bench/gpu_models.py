"""Models with random weights that are made on the device, without files: ours and transformers'."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from bench.harness import median, seconds
from worker import Engine
from worker.cache_memory import alone
from worker.device import Device, free_bytes
from worker.engine.engine import EngineCore
from worker.engine.slots import Slots
from worker.layers.weights.quantised_tensor import QuantisedTensor
from worker.layers.weights.slot import WeightSlot
from worker.loading.load import load
from worker.model_spec import ModelSpec
from worker.models.config_fields import Fields
from worker.models.model import Model, Placement
from worker.models.registry import FAMILIES

DEVIATION = 0.02  # of the weights
# Where a block of Q4_K has its scale and its minimum, in fp16, and their ratio for weights whose
# mean is 0. With another mean, all tokens of a mixture would choose the same experts.
SCALES = {0: 1.0, 2: 7.5}


@dataclass(frozen=True)
class Read:
    """The bytes of the weights that steps read. With E experts, of which a token chooses k, each
    with the same probability, a step of n tokens reads E · (1 - (1 - k / E)^n) of them in the mean.
    """

    always: int
    experts: int = 0  # bytes of all experts
    count: int = 1  # in a layer
    chosen: int = 1

    def step(self, tokens: int) -> float:
        return self.always + self.experts * (1 - (1 - self.chosen / self.count) ** tokens)


def family(shape: dict[str, Any]) -> str:
    return "qwen3_moe" if "num_experts" in shape else "qwen3"


def our_model(
    shape: dict[str, Any], kind: Type | None, device: torch.device
) -> tuple[Model, int, Read]:
    """A model in bf16, or with its matrices in blocks of `kind`, its parameters, and the bytes that
    steps read. Routers are plain, as in files."""
    tied = shape["tie_word_embeddings"]
    model = _empty_model(shape, device)
    generator = torch.Generator(device).manual_seed(0)
    parameters = always = experts = 0
    for name, slot in model.weight_map().items():
        values, nbytes = _fill(slot, _kind_of(name, slot, kind), device, generator)
        parameters += values
        if ".experts." in name:
            experts += nbytes
        elif tied or name != "model.embed_tokens.weight":
            always += nbytes
    count, chosen = shape.get("num_experts", 1), shape.get("num_experts_per_tok", 1)
    return model, parameters, Read(always, experts, count, chosen)


def weight_bytes(shape: dict[str, Any], kind: Type | None) -> int:
    """Bytes of all weights of `our_model`, which is not made for it."""
    found = 0
    for name, slot in _empty_model(shape, torch.device("cpu")).weight_map().items():
        values, stored = int(torch.Size(slot.shape).numel()), _kind_of(name, slot, kind)
        per_block, size = (1, 2) if stored is None else GGML_QUANT_SIZES[stored]
        found += values // per_block * size
    return found


def _empty_model(shape: dict[str, Any], device: torch.device) -> Model:
    place = Placement(torch.bfloat16, device)
    return FAMILIES[family(shape)](Fields(shape, "bench"), shape["tie_word_embeddings"], place)


def _kind_of(name: str, slot: WeightSlot, kind: Type | None) -> Type | None:
    """The type of the blocks of a weight; None: it is plain."""
    return kind if slot.quantised and not name.endswith(".mlp.gate.weight") else None


def _fill(
    slot: WeightSlot, kind: Type | None, device: torch.device, generator: torch.Generator
) -> tuple[int, int]:
    """Fill a slot; returns the values and bytes."""
    values = int(torch.Size(slot.shape).numel())
    if kind is None:
        tensor = torch.empty(slot.shape, dtype=torch.bfloat16, device=device)
        if len(slot.shape) == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, DEVIATION, generator=generator)
        slot.fill(tensor)
        return values, tensor.nbytes
    per_block, size = GGML_QUANT_SIZES[kind]
    shape = (slot.shape[0], slot.shape[1] // per_block, size)
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)
    for at, ratio in SCALES.items():
        scale = torch.full(shape[:2], ratio * DEVIATION / 256, dtype=torch.float16, device=device)
        blocks[..., at : at + 2] = scale[..., None].view(torch.uint8)
    slot.fill(QuantisedTensor(kind, slot.shape, blocks.flatten(1)))
    return values, blocks.nbytes


def our_engine(
    shape: dict[str, Any], kind: Type | None, device: torch.device, max_batch: int
) -> tuple[Engine, Read]:
    """An engine with the demo's tokenizer, and the bytes of the weights that steps read."""
    place = Device(device)
    demo = load(ModelSpec(reference="demo", dtype="bf16"), place)
    model, parameters, read = our_model(shape, kind, device)
    nbytes = read.always + read.experts
    info = replace(demo.info, parameters=parameters, weight_bytes=nbytes, family=family(shape))
    core = EngineCore(
        replace(demo, model=model, info=info),
        slots=Slots(max_batch),
        context=4096,
        share=alone(place.cache_room()),
        prefix_cache=False,
    )
    return Engine(core), read


def their_model(shape: dict[str, Any], device: torch.device) -> Any:
    """transformers' model in bf16, with SDPA."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {**shape, "dtype": "bfloat16"}
    config = AutoConfig.for_model(family(shape), **fields)
    auto: Any = AutoModelForCausalLM
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = auto.from_config(config, attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(before)
    return model.to(device).eval()


def cache_bytes(shape: dict[str, Any]) -> int:
    """Bytes of keys and values of one position."""
    heads = shape["num_key_value_heads"] * shape["head_dim"]
    return int(2 * 2 * shape["num_hidden_layers"] * heads)


def copy_bandwidth(device: torch.device, most: int) -> float:
    """Bytes per second that a copy of up to `most` bytes reads and writes: the median of nine. Both
    sides of it take half of the free memory at most, until it ends."""
    nbytes = min(most, free_bytes(device) // 4)
    taken = _seconds_of_copy(device, nbytes)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return 2 * nbytes / taken


def _seconds_of_copy(device: torch.device, nbytes: int) -> float:
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    times = [seconds(lambda: target.copy_(source)) for _ in range(10)]
    return median(times[1:])
