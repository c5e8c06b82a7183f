"""The model card in the repository has the text of the template in `training.card`."""

from __future__ import annotations

import re

from training.card import CARD
from worker.demo import MODEL_DIR


def test_the_shipped_model_card_has_the_text_of_the_template() -> None:
    texts = re.split(r"\{\w+(?::[^}]+)?\}", CARD)
    assert len(texts) > 10  # the template has that many fields
    pattern = "(.+?)".join(map(re.escape, texts))
    card = (MODEL_DIR / "README.md").read_text(encoding="utf-8")
    assert re.fullmatch(pattern, card, re.DOTALL)
