"""The type of each tensor in a file of a given kind, as llama.cpp chooses it.

The kinds *_S and *_M give more bits to the tensors that matter most: the head, and in some layers
the values of attention and the output of the MLP.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gguf import GGML_QUANT_SIZES, LlamaFileType
from gguf import GGMLQuantizationType as Type

from worker.gguf.tensor_format import DENSE, EMBEDDING, HEAD
from worker.option_values import GGUF_KINDS

# Name of a kind → type of most of its tensors.
KINDS: dict[str, Type] = {
    kind: Type[kind.removesuffix("_M").removesuffix("_S")] for kind in GGUF_KINDS
}
# For rows that blocks of 256 values can't hold.
SMALLER_BLOCKS = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0}
# Stored as F32 in files of every kind.
EXACT = ("ffn_gate_inp.weight", "_norm.weight", "ssm_conv1d.weight", ".bias")
BLOCK_TENSOR = re.compile(r"blk\.(\d+)\.(.+)\.weight")
VALUES = ("attn_v", "attn_qkv")
DOWN = ("ffn_down", "ffn_down_exps", "ffn_down_shexp")
EIGHT_EXPERTS = 8  # Mixtral: its attention is small beside its experts


def file_type(kind: str) -> LlamaFileType:
    return LlamaFileType[f"MOSTLY_{kind}"]


def types(kind: str, shapes: Mapping[str, tuple[int, ...]], experts: int) -> dict[str, Type]:
    """The type of each tensor by its name in the file. `experts`: per layer, 0 for dense models."""
    layers = 1 + max(
        (int(m[1]) for name in shapes if (m := BLOCK_TENSOR.fullmatch(name))), default=0
    )
    found = {}
    for name, shape in shapes.items():
        if len(shape) == 1 or name.endswith(EXACT):
            found[name] = Type.F32
        elif KINDS[kind] in DENSE:
            found[name] = KINDS[kind]
        else:
            is_head = name == HEAD or (name == EMBEDDING and HEAD not in shapes)
            found[name] = _fitting(
                _head_type(KINDS[kind], shape)
                if is_head
                else _block_type(kind, name, layers, experts),
                shape,
            )
    return found


def _head_type(main: Type, shape: tuple[int, ...]) -> Type:
    if main is Type.Q8_0 or shape[-1] % GGML_QUANT_SIZES[main][0]:
        return Type.Q8_0
    return Type.Q6_K


def _block_type(kind: str, name: str, layers: int, experts: int) -> Type:
    main, match = KINDS[kind], BLOCK_TENSOR.fullmatch(name)
    if match is None:
        return main
    index, part = int(match[1]), match[2]
    if part in ("attn_k", "attn_v") and experts == EIGHT_EXPERTS:
        return Type.Q8_0
    if part in VALUES and kind == "Q4_K_S" and index < 4:
        return Type.Q5_K
    if part in DOWN and kind == "Q4_K_S" and index < layers // 8:
        return Type.Q5_K
    if part in (*VALUES, *DOWN) and kind in ("Q4_K_M", "Q5_K_M"):
        return Type.Q6_K if _matters(index, layers) else main
    if part == "attn_output" and experts == EIGHT_EXPERTS and kind in ("Q4_K_S", "Q4_K_M"):
        return Type.Q5_K
    return main


def _matters(index: int, layers: int) -> bool:
    """The first and the last eighth of the layers, and every third between them."""
    eighth = layers // 8
    return index < eighth or index >= 7 * layers // 8 or (index - eighth) % 3 == 2


def _fitting(kind: Type, shape: tuple[int, ...]) -> Type:
    """`kind`, or a type with smaller blocks if these don't divide the rows. Rows of which no block
    is a part are stored as F16."""
    for one in (kind, SMALLER_BLOCKS.get(kind, kind)):
        if shape[-1] % GGML_QUANT_SIZES[one][0] == 0:
            return one
    return Type.F16
