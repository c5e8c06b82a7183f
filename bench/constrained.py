"""Constrained output over real schemas: what is refused, what is accepted wrongly, and mask times.

    python -m bench.constrained SCHEMAS.jsonl --tokens qwen.tiktoken --vocab 151936

SCHEMAS.jsonl has a line per schema, {"name", "schema", "tests": [{"valid", "data"}]}, as in the
data of jsonschemabench. The tokens of each instance are replayed through the grammar of its schema.
`--tokens`: a vocabulary as tiktoken writes it; without it, the tokenizer of `--model`.
"""

from __future__ import annotations

import argparse
import base64
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from jobs.api import grammar
from jobs.api.grammar import joined, limits, named
from jobs.errors import InvalidRequest
from worker.constraints.masks import MaskedRow, legal_tokens
from worker.constraints.matcher import Matcher
from worker.constraints.reasoning import Thinking
from worker.constraints.vocabulary import grammar_vocabulary
from worker.loading.description import describe
from worker.loading.find import find


class Replay(NamedTuple):
    """One instance: whether it is valid, and how many of its tokens were legal."""

    name: str
    valid: bool
    accepted: bool
    tokens: int
    text: str


class TikTokens(TokenizerWrapper):
    """The vocabulary in a file of tiktoken, padded, with one end token."""

    def __init__(self, path: Path, size: int) -> None:
        lines = [line.split() for line in path.read_bytes().splitlines()]
        texts = [base64.b64decode(token) for token, _ in lines]
        self.is_tokenizer_wrapper = True
        self.eos_token_id, self.bos_token_id = len(texts), None
        self.tokens = [*texts, b"<|end|>", *[b""] * (size - len(texts) - 1)]
        self.special_token_ids = [len(texts)]

        self._ids = {text: token_id for token_id, text in enumerate(texts)}
        self._longest = max(map(len, texts))

    def __call__(self, s: str) -> list[int]:
        """The longest tokens first, as the replays have them."""
        text, at = s.encode(), 0
        found: list[int] = []
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next(one for one in ends if text[at:one] in self._ids)
            found.append(self._ids[text[at:end]])
            at = end
        return found


def vocabulary(options: argparse.Namespace) -> tuple[LLTokenizer, frozenset[int], int]:
    """The vocabulary, its end tokens, and the width of the logits."""
    if options.tokens is None:
        described = describe(find(options.model), None)
        ends, size = described.defaults.eos_token_ids, options.vocab
        size = size or described.tokenizer.vocab_size
        return grammar_vocabulary(described.tokenizer, size, ends), ends, size
    wrapped = TikTokens(options.tokens, options.vocab)
    ends = frozenset((wrapped.eos_token_id,))
    slices = LLTokenizer.json_slices()
    made = LLTokenizer(wrapped, n_vocab=options.vocab, eos_token=sorted(ends), slices=slices)
    return made, ends, options.vocab


def replays(
    rows: list[dict[str, Any]],
    tokenizer: LLTokenizer,
    ends: frozenset[int],
    size: int,
    refused: Counter[str],
    times: dict[str, list[float]],
) -> Iterator[Replay]:
    """Replays the instances of all schemas that constrain; notes the others, and times."""
    for row in rows:
        begin = time.perf_counter()
        try:
            form = grammar.of_schema(row["schema"], "response_format")
            grammar.check(form)
            checked = time.perf_counter()
            parts = Thinking().before("answer") + named("answer", form)
            start = LLMatcher(tokenizer, joined(parts), log_level=0, limits=limits())
            if start.is_error():
                raise grammar.refusal(start.get_error(), form)
        except InvalidRequest as error:
            refused[error.message.removeprefix("response_format: ")] += 1
            continue
        times["check"].append(checked - begin)
        times["compile"].append(time.perf_counter() - checked)
        for test in row["tests"]:
            text = json.dumps(test["data"], ensure_ascii=False)
            ids = tokenizer.greedy_tokenize(text)
            matcher, number = Matcher(start, ends, ends), 0
            for token_id in ids:
                begin = time.perf_counter()
                (mask,) = legal_tokens([MaskedRow(0, matcher)], size)
                times["mask"].append(time.perf_counter() - begin)
                if not mask.view(np.uint32)[token_id // 32] >> np.uint32(token_id % 32) & 1:
                    break
                matcher.advance([token_id])
                number += 1
            accepts = matcher.inner is not None and matcher.inner.is_accepting()
            whole = number == len(ids) and accepts
            yield Replay(row["name"], test["valid"], whole, number, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("schemas", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=Path)
    parser.add_argument("--vocab", type=int, default=0)
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.schemas.open(encoding="utf-8")]
    begin = time.perf_counter()
    tokenizer, ends, size = vocabulary(options)
    print(f"vocabulary of {size}: {time.perf_counter() - begin:.1f} s")
    refused: Counter[str] = Counter()
    times: dict[str, list[float]] = {"check": [], "compile": [], "mask": []}
    done = [*replays(rows, tokenizer, ends, size, refused, times)]
    print(f"{len(rows)} schemas: {sum(refused.values())} refused")
    for message, number in refused.most_common():
        print(f"  {number:3}  {message}")
    for valid in (True, False):
        group = [one for one in done if one.valid is valid]
        wrong = [one for one in group if one.accepted is not valid]
        kind = "valid" if valid else "invalid"
        print(f"{len(group)} {kind} instances: {len(wrong)} wrong")
        for one in wrong:
            print(f"  {one.name}: {one.tokens} tokens of {one.text[:100]}")
    for kind, values in times.items():
        at = np.percentile(values, (50, 95, 99, 99.9)) * 1e6
        print(kind, "µs p50 {:.0f} p95 {:.0f} p99 {:.0f} p99.9 {:.0f}".format(*at), len(values))


if __name__ == "__main__":
    main()
