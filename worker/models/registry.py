"""Model families by the model_type of their config.json. A new family adds one file and its lines
here."""

from __future__ import annotations

from worker.models.gemma2 import GEMMA2
from worker.models.gemma3 import GEMMA3
from worker.models.glm4 import GLM4
from worker.models.gpt_oss import GPT_OSS
from worker.models.granite import GRANITE
from worker.models.llama import LLAMA
from worker.models.mistral import MINISTRAL, MISTRAL
from worker.models.mixtral import MIXTRAL
from worker.models.model import Family
from worker.models.olmo import OLMO2, OLMO3
from worker.models.phi3 import PHI3
from worker.models.qwen2 import QWEN2
from worker.models.qwen2_moe import QWEN2_MOE
from worker.models.qwen3 import QWEN3
from worker.models.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from worker.models.qwen3_moe import QWEN3_MOE
from worker.models.qwen3_next import QWEN3_NEXT
from worker.models.smollm3 import SMOLLM3

FAMILIES: dict[str, Family] = {
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gemma3_text": GEMMA3,
    "glm4": GLM4,
    "gpt_oss": GPT_OSS,
    "granite": GRANITE,
    "llama": LLAMA,
    "ministral": MINISTRAL,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "phi3": PHI3,
    "qwen2": QWEN2,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5_MOE,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "qwen3_5_text": QWEN3_5,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": QWEN3_NEXT,
    "smollm3": SMOLLM3,
}
