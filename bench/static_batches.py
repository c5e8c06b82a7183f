"""transformers' static batching over rows with a common beginning, at its best."""

from __future__ import annotations

import copy
from typing import Any

import torch


class StaticBatches:
    """Batches of `batch` rows, sorted by the length of their prompts. The state of the tokens that
    all prompts begin with is computed once and copied for each batch; the rest is padded on the
    left. A batch ends with its longest answer."""

    def __init__(self, model: Any, device: torch.device, batch: int) -> None:
        self._model, self._device, self._batch = model, device, batch

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], tokens: list[int], common: int) -> None:
        """Generate `tokens` tokens greedily after each prompt. `common`: length of the common
        beginning."""
        known = self._state(prompts[0][:common]) if common else None
        order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
        for start in range(0, len(order), self._batch):
            rows = order[start : start + self._batch]
            longest = max(tokens[row] for row in rows)
            ids, mask = self._padded([prompts[row] for row in rows], common)
            options: dict[str, Any] = {"min_new_tokens": longest, "max_new_tokens": longest}
            if known is not None:
                options["past_key_values"] = copy.deepcopy(known)
                options["past_key_values"].batch_repeat_interleave(len(rows))
            self._model.generate(
                ids, attention_mask=mask, do_sample=False, pad_token_id=0, **options
            )

    def _state(self, ids: list[int]) -> Any:
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        self._model(torch.tensor([ids], device=self._device), past_key_values=cache)
        return cache

    def _padded(self, prompts: list[list[int]], common: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and attention mask [rows, longest]: padding comes after the common tokens."""
        longest = max(map(len, prompts))
        ids, mask = [], []
        for prompt in prompts:
            gap = longest - len(prompt)
            ids.append([*prompt[:common], *[0] * gap, *prompt[common:]])
            mask.append([*[1] * common, *[0] * gap, *[1] * (len(prompt) - common)])
        return torch.tensor(ids, device=self._device), torch.tensor(mask, device=self._device)
