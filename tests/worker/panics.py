"""Panics of the tokenizers library, which reach Python as an exception that is not an Exception.

A pattern of a real tokenizer gives up on "x", 11 million spaces, "x". The pattern here does so on
`TRIGGER`, for the same reason: too many retries in one match.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

PATTERN = "(q+)+!"
TRIGGER = "q" * 40


def make_fragile(folder: Path) -> None:
    """Change the tokenizer in a model folder so that it panics on `TRIGGER`."""
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    split = {
        "type": "Split",
        "pattern": {"Regex": PATTERN},
        "behavior": "Isolated",
        "invert": False,
    }
    values["pre_tokenizer"]["pretokenizers"].insert(0, split)
    file.write_text(json.dumps(values), encoding="utf-8")


def panic() -> NoReturn:
    """Raise a real PanicException."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    fragile = Tokenizer(models.BPE())
    fragile.pre_tokenizer = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    fragile.encode(TRIGGER)
    raise AssertionError("the library did not panic")
