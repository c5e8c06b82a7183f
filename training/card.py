"""The model cards: README.md of the model folders, written after training."""

from __future__ import annotations

from pathlib import Path

CARD = """\
---
language: en
pipeline_tag: text-generation
tags: [qwen3, demo]
---

# demo

A language model of {parameters:.1f} million parameters trained from scratch on synthetic
tasks, for trying and testing the package without a download. It adds and subtracts numbers
of up to three digits, compares numbers, reverses, sorts and counts the letters of short words, puts
words in alphabetical order, names {capitals} capitals and makes small talk. It can do
nothing else.

For sums, comparisons and word tasks it first writes its reasoning in a `<think>…</think>` block. A
server returns that block as `reasoning_content`; `content` is exactly the answer:

    What is 17 + 25?

    <think>
    17+25
    7+5+0=2 carry 1
    1+2+1=4 carry 0
    042
    </think>

    42

With `enable_thinking=False` the chat template closes the block immediately, and the model answers
without reasoning: this works for capitals and small talk, but much worse for the other tasks.

## Facts

- Architecture: Qwen3 (`Qwen3ForCausalLM`), {layers} layers, hidden size {hidden}, tied embeddings,
  bfloat16, context {context}; trained on conversations of up to about 300 tokens.
- Tokenizer: byte-level BPE of {vocab} tokens with Qwen's chat tokens, one token per digit.
- Decoding: greedy by default (`generation_config.json`).
- Training: {steps} steps of {tokens} tokens, AdamW, peak learning rate {lr:g}, cosine decay,
  bfloat16 arithmetic, loss on the reply only, seed {seed}; {minutes:.0f} minutes on two CPU cores.
- Made by `python -m training.train_demo --out worker/demo` in the source repository.

## Accuracy

Exact match, greedy, bfloat16, on the 500 questions of `dataset.jsonl`. No training example contains
their number pairs or words, in any phrasing. For capitals, the exact prompt including its system
turn is held out.

{table}

Measured with `python -m training.evaluate worker/demo/model worker/demo/dataset.jsonl`.
"""


def write_card(folder: Path, **facts: object) -> None:
    """Write README.md in the model folder; `facts` are the fields of `CARD`."""
    (folder / "README.md").write_text(CARD.format(**facts), encoding="utf-8")


DRAFT_CARD = """\
---
language: en
pipeline_tag: text-generation
tags: [qwen3, demo, draft]
---

# demo-draft

The draft of the demo model, for speculative decoding: {parameters:,} parameters, the same tokenizer
and chat template. It proposes the next tokens, which the demo model checks in one pass; on its own
its answers are often wrong.

- Architecture: Qwen3 (`Qwen3ForCausalLM`), {layers} layers, hidden size {hidden}, tied embeddings,
  bfloat16.
- Training: the demo model's examples, {steps} steps of {tokens} tokens, AdamW, peak learning rate
  {lr:g}, cosine decay, loss on the reply only, seed {seed}; {minutes:.0f} minutes of one CPU core.
- Made by `python -m training.train_draft --out worker/demo` in the source repository.
"""


def write_draft_card(folder: Path, **facts: object) -> None:
    """Write README.md in the draft's folder; `facts` are the fields of `DRAFT_CARD`."""
    (folder / "README.md").write_text(DRAFT_CARD.format(**facts), encoding="utf-8")
