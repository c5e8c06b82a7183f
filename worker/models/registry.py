"""Model families by the model_type of their config.json. Adding a family: one file, one line."""

from __future__ import annotations

from worker.models.llama import llama
from worker.models.model import Family
from worker.models.qwen3 import qwen3

FAMILIES: dict[str, Family] = {
    "llama": llama,
    "qwen3": qwen3,
}
