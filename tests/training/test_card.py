"""The model cards in the repository have the text of the templates in `training.card`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from training.card import CARD, DRAFT_CARD
from worker.demo import DRAFT_DIR, MODEL_DIR


@pytest.mark.parametrize(("folder", "template"), [(MODEL_DIR, CARD), (DRAFT_DIR, DRAFT_CARD)])
def test_the_shipped_model_card_has_the_text_of_the_template(folder: Path, template: str) -> None:
    texts = re.split(r"\{\w+(?::[^}]+)?\}", template)
    assert len(texts) > 8  # the templates have that many fields
    pattern = "(.+?)".join(map(re.escape, texts))
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert re.fullmatch(pattern, card, re.DOTALL)


def test_the_draft_is_about_a_tenth_of_the_model_and_has_its_tokenizer() -> None:
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (DRAFT_DIR, MODEL_DIR)]
    assert 0.05 < sizes[0] / sizes[1] < 0.15
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (DRAFT_DIR / name).read_bytes() == (MODEL_DIR / name).read_bytes()
