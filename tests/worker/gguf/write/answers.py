"""Files that our quantiser writes from small random models, and llama.cpp's answers to them, which
are recorded in llama_cpp_answers.json. To record them again, with two interpreters:

    python -m tests.worker.gguf.write.answers make FOLDER       with the packages of the tests
    python -m tests.worker.gguf.write.answers record FOLDER     with llama-cpp-python and gguf
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from typing import Any

RECORDED = Path(__file__).with_name("llama_cpp_answers.json")
PROMPT = [5, 260, 17, 40, 9, 301, 33, 12, 250, 7, 7, 81]
TOKENS = 64
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GPT_OSS = {
    "swiglu_limit": 7.0,
    "num_hidden_layers": 4,
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 5e3, "factor": 8.0},
        "original_max_position_embeddings": 64,
    },
}
LONGROPE = {
    **{"max_position_embeddings": 512, "original_max_position_embeddings": 120},
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(4)],
        "long_factor": [1.0 + 0.1 * i for i in range(4)],
    },
}
HYBRID = {
    **WIDE,
    **{"num_hidden_layers": 12, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}


@dataclass(frozen=True)
class Written:
    """A file to write: a family, a kind of quantisation, and fields of the config."""

    family: str
    kind: str
    fields: dict[str, Any] = field(default_factory=dict)


FILES = {
    "llama": Written("llama", "F16"),
    "llama3": Written("llama", "F16", {"rope_parameters": LLAMA3, "num_key_value_heads": 4}),
    "mistral": Written("mistral", "F16"),
    "qwen2": Written("qwen2", "F16", {"head_dim": 8}),
    "qwen3": Written("qwen3", "F16"),
    "qwen3moe": Written("qwen3_moe", "F16"),
    "gemma3": Written("gemma3_text", "F16", {"query_pre_attn_scalar": 16}),
    "gemma2": Written("gemma2", "F16", {"query_pre_attn_scalar": 16}),
    "glm4": Written("glm4", "F16"),
    "gpt_oss": Written("gpt_oss", "F16", GPT_OSS),
    "granite": Written("granite", "F16"),
    "ministral": Written("ministral", "F16", {"sliding_window": 512}),
    "mixtral": Written("mixtral", "F16"),
    "olmo2": Written("olmo2", "F16"),
    "olmo3": Written("olmo3", "F16"),
    "phi3": Written("phi3", "F16"),
    "phi3 longrope": Written("phi3", "F16", LONGROPE),
    "qwen2moe": Written("qwen2_moe", "F16", {"head_dim": 8, "norm_topk_prob": False}),
    "qwen3next": Written("qwen3_next", "F16"),
    "qwen35": Written("qwen3_5_text", "F16"),
    "qwen35moe": Written("qwen3_5_moe_text", "F16"),
    "smollm3": Written("smollm3", "F16", {"no_rope_layer_interval": 4}),
    **{
        kind: Written("qwen3", kind, WIDE)
        for kind in ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q5_1", "Q4_0")
    },
    "layers Q4_K_M": Written("llama", "Q4_K_M", {**WIDE, "num_hidden_layers": 9, "head_dim": 64}),
    "layers Q4_K_S": Written("llama", "Q4_K_S", {**WIDE, "num_hidden_layers": 9, "head_dim": 64}),
    "experts Q4_K_M": Written(
        "qwen3_moe",
        "Q4_K_M",
        {**WIDE, "num_experts": 8, "moe_intermediate_size": 256, "num_hidden_layers": 3},
    ),
    "mixtral Q4_K_M": Written("mixtral", "Q4_K_M", {**WIDE, "num_local_experts": 8}),
    "phi3 Q4_K_M": Written("phi3", "Q4_K_M", {**WIDE, "num_hidden_layers": 9, "head_dim": 64}),
    "phi3 Q5_K_M": Written("phi3", "Q5_K_M", {**WIDE, "head_dim": 64}),
    "qwen3next Q4_K_M": Written("qwen3_next", "Q4_K_M", HYBRID),
    "qwen35 Q5_K_M": Written("qwen3_5_text", "Q5_K_M", HYBRID),
    "gpt_oss Q4_K_M": Written("gpt_oss", "Q4_K_M", {**GPT_OSS, **WIDE, "num_hidden_layers": 4}),
    "narrow Q5_K_S": Written("qwen3", "Q5_K_S"),  # rows that blocks of 256 don't divide
}


def write(name: str, folder: Path) -> Path:
    """Make the model and its file. The bytes are the same on every CPU if the model is small:
    of a few million random values some differ in their last bit between AVX2 and AVX-512."""
    from tests.worker.checkpoints import make_checkpoint
    from worker.gguf.write.model import quantise_model
    from worker.loading.find import find

    given = FILES[name]
    checkpoint = make_checkpoint(folder / "model", given.family, dtype="float16", **given.fields)
    output = folder / "model.gguf"
    quantise_model(find(str(checkpoint)), given.kind, output, lambda done, total: None)
    return output


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _record(folder: Path) -> dict[str, Any]:
    """llama.cpp's greedy tokens, and the types it chooses for the tensors of the same model."""
    llama_cpp: Any = import_module("llama_cpp")
    from gguf import GGUFReader, LlamaFileType

    answers: dict[str, Any] = {}
    for name, given in FILES.items():
        path = folder / name / "model.gguf"
        if given.kind == "F16":
            # One token at a time, as answers are generated.
            model = llama_cpp.Llama(str(path), n_ctx=256, n_batch=1, n_threads=1, verbose=False)
            tokens = model.generate(PROMPT, temp=0.0)
            found = [token for token, _ in zip(tokens, range(TOKENS), strict=False)]
            answers[name] = {"file": digest(path), "tokens": found}
            model.close()
        else:
            params = llama_cpp.llama_model_quantize_default_params()
            params.ftype = int(LlamaFileType[f"MOSTLY_{given.kind}"])
            params.nthread = 1
            source, output = folder / name / "plain.gguf", folder / name / "theirs.gguf"
            failed = llama_cpp.llama_model_quantize(
                str(source).encode(), str(output).encode(), params
            )
            assert not failed, name
            stored = {one.name: one.tensor_type.name for one in GGUFReader(output).tensors}
            answers[name] = {"types": stored}
    return answers


def main(command: str, folder: Path) -> None:
    if command == "make":
        from worker.gguf.write.model import quantise_model
        from worker.loading.find import find

        rmtree(folder, ignore_errors=True)
        for name in FILES:
            write(name, folder / name)
            model = find(str(folder / name / "model"))
            plain = folder / name / "plain.gguf"
            quantise_model(model, "F16", plain, lambda done, total: None)
    else:
        RECORDED.write_text(json.dumps(_record(folder), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
