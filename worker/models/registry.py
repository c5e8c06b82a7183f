"""Model families by the model_type of their config.json. Adding a family: one file, one line."""

from __future__ import annotations

from worker.models.gemma3 import gemma3
from worker.models.llama import llama
from worker.models.model import Family
from worker.models.qwen3 import qwen3
from worker.models.qwen3_5 import qwen3_5, qwen3_5_moe
from worker.models.qwen3_moe import qwen3_moe
from worker.models.qwen3_next import qwen3_next

FAMILIES: dict[str, Family] = {
    "gemma3": gemma3,
    "gemma3_text": gemma3,
    "llama": llama,
    "qwen3": qwen3,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
    "qwen3_5_moe_text": qwen3_5_moe,
    "qwen3_5_text": qwen3_5,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
}
