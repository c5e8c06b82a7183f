"""Checks whether a model can run here before any weight is read.

The model is built on torch's `meta` device, where tensors have shapes and no memory, and compared
with the headers of the weight files. Of a hub model, the headers alone are fetched for this.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from gguf import GGMLQuantizationType

from jobs.errors import JobError, invalid
from worker.checkpoint import weights
from worker.checkpoint.config import ModelConfig
from worker.checkpoint.dtypes import name_of
from worker.checkpoint.headers import Headers, TensorHeader
from worker.checkpoint.quantization import DEQUANTISED
from worker.checkpoint.tokenizer import Tokenizer
from worker.device import Device, choose_dtype
from worker.gguf.read.source import GgufSource
from worker.layers.cache import LayerCache, sequence_size
from worker.layers.kv_cache import WindowKVCache
from worker.layers.shard import Indivisible, Shard
from worker.layers.weights import storage
from worker.layers.weights.compression import Compression, compression_of
from worker.layers.weights.quantised_tensor import bytes_of, stays_quantised
from worker.layers.weights.slot import WeightSlot
from worker.layers.weights.storage import ProductKind
from worker.loading.description import ModelDescription
from worker.model_spec import ModelSpec
from worker.models.model import Model, Placement
from worker.models.registry import FAMILIES

Form = GGMLQuantizationType | None  # of a tensor in memory; None: plain values


@dataclass(frozen=True)
class Products:
    """The kind of product with the matrices of one quantised type."""

    kind: str
    matrices: int
    product: ProductKind
    extra_bytes: int  # that they take beyond their blocks in the file

    def __str__(self) -> str:
        extra = f" (+{self.extra_bytes / 2**20:.0f} MiB)" if self.extra_bytes else ""
        return f"{self.kind} x{self.matrices}: {self.product.value}{extra}"


@dataclass(frozen=True)
class Preflight:
    """A model that this version supports, and the memory that it needs on the device."""

    model: ModelDescription
    tokenizer: Tokenizer  # limited to the ids that the model has
    tied: bool
    parameters: int
    weight_bytes: int  # in memory
    blocks: tuple[str, ...]  # GGUF's quantised types that weights have in memory
    products: tuple[Products, ...]  # with the matrices that the files quantise, by type
    dtype: torch.dtype
    device: torch.device
    vocab_size: int  # rows of the head
    context_length: int  # positions that the config gives, with their stretch
    longest: int  # tokens of one sequence whose cache fits beside the weights
    free_bytes: int  # of the device, now, within its budget
    parts: int  # devices that the weights are divided over
    caches: Sequence[LayerCache]  # of one layer each, without storage
    widths: tuple[int, int, int]  # hidden states, widest projection, vocabulary
    slow: str | None  # the types whose products are slow, with the remedy
    budget: int | None = None  # of the device

    @property
    def dtype_name(self) -> str:
        return name_of(self.dtype)

    @property
    def formats(self) -> str:
        """The types of the weights in memory: "bfloat16, Q4_K, Q6_K"."""
        return ", ".join((self.dtype_name, *self.blocks))

    @property
    def obstacle(self) -> str | None:
        """The reason for which the weights don't fit on the device, with the remedy; None if they
        fit."""
        part = -(-self.weight_bytes // self.parts)
        if part <= self.free_bytes:
            return None
        need, free = part / 2**30, self.free_bytes / 2**30
        extra = sum(one.extra_bytes for one in self.products)
        kept = (self.weight_bytes - extra) / 2**30
        instead = f"--keep-quantised (slow, needs {kept:.1f} GiB), " if extra else ""
        within = "" if self.budget is None else f" of --memory {self.budget / 2**30:.1f} GiB"
        each = "" if self.parts == 1 else f" on each of {self.parts} devices"
        return (
            f"{self.model.source.reference} needs {need:.1f} GiB for its weights in "
            f"{self.formats}{each} and {self.device} has {free:.1f} GiB free{within}: use "
            f"{instead}a smaller model, another dtype or another device"
        )

    @property
    def how(self) -> str | None:
        """The kinds of products with the quantised matrices: "Q5_0 x120: integer products; …"."""
        return "; ".join(map(str, self.products)) or None

    @property
    def reencoded(self) -> str | None:
        """The types of the files whose values change while they are loaded."""
        kinds = [one.kind for one in self.products if one.product is ProductKind.REENCODED]
        return ", ".join(kinds) or None

    def require_room(self) -> None:
        """Raise JobError("out_of_memory") if the weights don't fit."""
        if self.obstacle is not None:
            raise JobError("out_of_memory", self.obstacle)


def preflight(
    model: ModelDescription, spec: ModelSpec, device: Device, headers: Headers
) -> Preflight:
    """Check everything that can be checked without reading weights. `headers` may be a checkpoint.
    Weights that are not quantised in the files are compressed while they are loaded; of those that
    are, types that no kernel multiplies with are re-encoded, unless `spec.keep_quantised`.

    Raises JobError: model_not_found, unsupported_model, invalid_request.
    """
    try:
        return _preflight(model, spec, device, headers)
    except JobError as error:
        wrapper = model.config.wrapper
        if wrapper is None or error.code != "unsupported_model":
            raise
        raise JobError(
            "unsupported_model",
            f"unsupported model_type '{wrapper}' in {model.source.reference}: its text model "
            f"('{model.config.model_type}') can't be read on its own ({error.message}); supported: "
            f"{', '.join(sorted(FAMILIES))}",
        ) from None


def _preflight(
    model: ModelDescription, spec: ModelSpec, device: Device, headers: Headers
) -> Preflight:
    config, compression = model.config, compression_of(spec.quantize)
    quantization, place = config.quantization, device.torch
    if spec.tensor_parallel > 1 and isinstance(model.source, GgufSource):
        raise invalid(
            f"tensor_parallel can't split {model.source.reference}: it is a GGUF file, whose "
            "blocks would be sliced; use safetensors, or one rank",
            "tensor_parallel",
        )
    tied = weights.is_tied(config.tied, headers, quantization)
    stored = headers.dtype({quantization.dtype} if quantization else ()) or DEQUANTISED
    chosen = choose_dtype(spec.dtype, stored, place)
    shape = _shape(config, tied, chosen, place, spec.tensor_parallel)
    tokenizer = model.tokenizer.limited_to(shape.vocab_size)
    slots = shape.weight_map()
    found = weights.check(slots, headers, quantization)
    parameters = sum(prod(slot.shape) for slot in slots.values())
    stored_as = {name: headers.tensors[found[name].name] for name in slots}
    kinds = {GGMLQuantizationType[header.dtype] for header in stored_as.values() if header.blocks}
    if compression is not None:
        kinds.add(compression.kind)
    storage.prepare(kinds, chosen, place)
    products = {
        name: _product(name, slots[name], header, chosen, place, spec.keep_quantised)
        for name, header in stored_as.items()
        # An embedding that is no head is only looked up.
        if slots[name].quantised and header.blocks and (tied or name != weights.EMBEDDING)
    }
    forms: dict[str, list[Form]] = {}
    for name, slot in slots.items():
        forms[name] = [_form(slot, stored_as[name], place, compression)]
        if products.get(name) is ProductKind.REENCODED:
            looked_up = forms[name] if name == weights.EMBEDDING else []
            forms[name] = [*looked_up, storage.TARGET]
        elif name == weights.EMBEDDING and tied and (form := forms[name][0]) is not None:
            # The head's blocks are packed. On a CPU those of files are views for the embedding.
            columns = slot.shape[-1]
            packed = storage.product_kind(form, columns, chosen, place, spec.keep_quantised)
            viewed = packed is ProductKind.INTEGERS and stored_as[name].blocks
            if packed in (ProductKind.INTEGERS, ProductKind.TRITON) and not viewed:
                forms[name] *= 2
    sizes = {
        name: sum(
            _bytes(slots[name].shape, form, chosen, place, name == weights.EMBEDDING and not at)
            for at, form in enumerate(held)
        )
        for name, held in forms.items()
    }
    weight_bytes = sum(sizes.values())
    blocks = {form.name for held in forms.values() for form in held if form is not None}
    caches, free = shape.make_caches(), device.free_bytes()
    cache_bytes = device.cache_room(weight_bytes // device.ranks.parts)
    return Preflight(
        model=model,
        tokenizer=tokenizer,
        tied=tied,
        parameters=parameters,
        weight_bytes=weight_bytes,
        blocks=tuple(sorted(blocks)),
        products=_products(slots, stored_as, products, sizes),
        dtype=chosen,
        device=place,
        vocab_size=shape.vocab_size,
        context_length=shape.context_length,
        longest=bisect_right(
            range(1, shape.context_length + 1),
            cache_bytes,
            key=lambda tokens: (
                device.ranks.ranks_each
                * sum(cache.bytes_for(sequence_size(tokens)) for cache in caches)
            ),
        ),
        free_bytes=free,
        parts=device.ranks.parts,
        caches=caches,
        widths=_widths(slots),
        slow=_slow(products, stored_as, compression, spec.keep_quantised, chosen, place),
        budget=device.budget,
    )


def _widths(slots: Mapping[str, WeightSlot]) -> tuple[int, int, int]:
    vocab, hidden = slots[weights.EMBEDDING].shape
    lookups = (weights.EMBEDDING, weights.HEAD)
    matrices = [one.shape for name, one in slots.items() if name not in lookups]
    return hidden, max((shape[-2] for shape in matrices if len(shape) > 1), default=hidden), vocab


def _products(
    slots: Mapping[str, WeightSlot],
    stored_as: Mapping[str, TensorHeader],
    products: Mapping[str, ProductKind],
    sizes: Mapping[str, int],
) -> tuple[Products, ...]:
    found: dict[
        tuple[str, ProductKind], list[int]
    ] = {}  # of each matrix what it takes beyond its blocks
    for name, product in products.items():
        kind, extra = GGMLQuantizationType[stored_as[name].dtype], 0
        if product is ProductKind.REENCODED:
            extra = sizes[name] - bytes_of(prod(slots[name].shape), kind)
        found.setdefault((kind.name, product), []).append(extra)
    return tuple(
        Products(kind, len(extra), product, sum(extra))
        for (kind, product), extra in sorted(found.items(), key=lambda one: one[0][0])
    )


def _slow(
    products: Mapping[str, ProductKind],
    stored_as: Mapping[str, TensorHeader],
    compression: Compression | None,
    keep_quantised: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """The types that are dequantised for each product, with the remedy; None if there are none."""
    has_kernels = storage.reencodes(dtype, device)
    kinds = {
        stored_as[name].dtype
        for name, product in products.items()
        if product is ProductKind.DEQUANTISED
    }
    if compression is not None and not has_kernels:
        kinds.add(compression.kind.name)
    if not kinds:
        return None
    if has_kernels:  # so they were to stay as they are
        remedy = "leave out --keep-quantised"
    elif storage.reencodes(torch.bfloat16, device):
        remedy = "use --dtype bfloat16" + (" without --keep-quantised" if keep_quantised else "")
    else:
        remedy = "install what the line about kernels names, or use weights that are not quantised"
    return (
        f"weights in {', '.join(sorted(kinds))} are dequantised for each product, which can take "
        f"30 times as long: {remedy}"
    )


def _product(
    name: str,
    slot: WeightSlot,
    header: TensorHeader,
    dtype: torch.dtype,
    device: torch.device,
    keep_quantised: bool,
) -> ProductKind:
    if name == weights.EMBEDDING and not _stays_quantised(header, device):
        return ProductKind.PLAIN  # a tied head has the embedding's values
    kind = GGMLQuantizationType[header.dtype]
    return storage.product_kind(kind, slot.shape[-1], dtype, device, keep_quantised)


def smallest_window(config: ModelConfig, device: torch.device) -> int | None:
    """Tokens of the model's smallest sliding window; None: it has none. Raises JobError
    (unsupported_model)."""
    caches = _shape(config, config.tied, config.dtype, device).make_caches()
    windows = [one.window for one in caches if isinstance(one, WindowKVCache) and one.window]
    return min(windows, default=None)


def _shape(
    config: ModelConfig, tied: bool, dtype: torch.dtype, device: torch.device, ranks: int = 1
) -> Model:
    """The model without memory, as it is built for a device; of several ranks, the part of the
    first one."""
    place = Placement(dtype, torch.device("meta"), built_for=device, shard=Shard(ranks=ranks))
    try:
        return FAMILIES[config.model_type](config.fields, tied, place)
    except Indivisible as error:
        raise invalid(
            f"tensor_parallel {ranks}: {config.fields.where}: {error}", "tensor_parallel"
        ) from None
    except RuntimeError as error:  # torch's, if the product of two sizes overflows
        fact = str(error).splitlines()[0]
        raise config.fields.error(f"its sizes make impossible tensors ({fact})") from None


def _stays_quantised(header: TensorHeader, device: torch.device) -> bool:
    return header.blocks and stays_quantised(GGMLQuantizationType[header.dtype], device)


def _form(
    slot: WeightSlot,
    header: TensorHeader,
    device: torch.device,
    compression: Compression | None,
) -> Form:
    """The form of a slot's tensor that is not re-encoded."""
    if slot.quantised and _stays_quantised(header, device):
        return GGMLQuantizationType[header.dtype]
    if slot.quantised and compression is not None and compression.fits(slot.shape):
        return compression.kind
    return None


def _bytes(
    shape: Sequence[int], form: Form, dtype: torch.dtype, device: torch.device, looked_up: bool
) -> int:
    """Memory of a tensor. `looked_up`: it is the table of an embedding."""
    *rows, columns = shape
    if form is None:
        return prod(shape) * dtype.itemsize
    if looked_up:
        return bytes_of(prod(shape), form)
    return storage.bytes_of_blocks(form, prod(rows), columns, dtype, device)
