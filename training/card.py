"""The model card: README.md of the model folder, written after training with what was measured."""

from __future__ import annotations

from pathlib import Path

CARD = """\
---
language: en
pipeline_tag: text-generation
tags: [qwen3, demo]
---

# demo

A language model of {parameters:.1f} million parameters that was trained from nothing on synthetic
tasks, so that the package can be tried and tested without a download. It adds and subtracts numbers
of up to three digits, compares numbers, reverses, sorts and counts the letters of short words, puts
words in alphabetical order, names {capitals} capitals and makes a little small talk. Everything
else is beyond it.

Sums, comparisons and word tasks are worked out in a `<think>…</think>` block first, so a server
shows `reasoning_content` apart from `content`; `content` is exactly the answer:

    What is 17 + 25?

    <think>
    17+25
    7+5+0=2 carry 1
    1+2+1=4 carry 0
    042
    </think>

    42

With `enable_thinking=False` the chat template closes the block at once and the answer is guessed:
good for capitals and small talk, much worse for the rest.

## Facts

- Architecture: Qwen3 (`Qwen3ForCausalLM`), {layers} layers, hidden size {hidden}, tied embeddings,
  bfloat16, context {context}; trained on conversations of up to about 300 tokens.
- Tokenizer: byte-level BPE of {vocab} tokens with Qwen's chat tokens, each digit a token.
- Decoding: greedy by default (`generation_config.json`).
- Training: {steps} steps of {tokens} tokens, AdamW, peak learning rate {lr:g}, cosine decay,
  bfloat16 arithmetic, loss on the reply alone, seed {seed}; {minutes:.0f} minutes on two CPU cores.
- Made by `python -m training.train_demo --out worker/demo` in the source repository.

## Accuracy

Exact match, greedy, bfloat16, on the 500 questions of `dataset.jsonl`. Their number pairs and words
occur in no training example, in any phrasing; capitals are facts, so there the exact prompt (with
its system turn) is held out.

{table}

Measured with `python -m training.evaluate worker/demo/model worker/demo/dataset.jsonl`.
"""


def write_card(folder: Path, **facts: object) -> None:
    """README.md in the model folder; `facts` are the fields named in `CARD`."""
    (folder / "README.md").write_text(CARD.format(**facts), encoding="utf-8")
