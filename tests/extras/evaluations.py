"""Tasks of lm-evaluation-harness over a few documents, and the comparison of two models on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

TOLERANCE = 1e-3
DOCUMENTS = [
    {
        "question": f"What is {number} plus {number + 2}?",
        "choices": [f"{2 * number + 2}", f"the number {number}", "not a number at all", "No."],
        "answer": number % 4,
        "text": "The quick brown fox jumps over the lazy dog, and the dog sleeps. " * number,
    }
    for number in range(1, 9)
]


def write_documents(folder: Path) -> None:
    text = "".join(f"{json.dumps(one)}\n" for one in DOCUMENTS)
    (folder / "documents.jsonl").write_text(text)


def tasks(folder: Path) -> list[dict[str, Any]]:
    """Multiple choice, perplexity of texts and generation, over the documents in a folder."""
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "documents.jsonl")}},
        "test_split": "test",
        "fewshot_split": "test",
        "doc_to_text": "{{question}}\nAnswer:",
    }
    generation = {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n", "dog", "<|im_end|>"], "max_gen_toks": 10},
        "metric_list": [{"metric": "exact_match"}],
    }
    choice = {"output_type": "multiple_choice", "doc_to_choice": "choices"}
    return [
        {**common, **choice, "task": "choices", "doc_to_target": "answer", "num_fewshot": 2},
        # White space at the end of the context, and none before the choices.
        {
            **{**common, **choice, "task": "spaces", "doc_to_target": "answer"},
            **{"doc_to_text": "{{question}} \n ", "target_delimiter": ""},
        },
        # An empty context.
        {**common, **choice, "task": "alone", "doc_to_target": "answer", "doc_to_text": ""},
        {
            **{**common, "task": "texts", "output_type": "loglikelihood_rolling"},
            **{"doc_to_text": "", "doc_to_target": "{{text}}"},
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        {**common, **generation, "task": "answers", "num_fewshot": 1},
        {**common, **generation, "task": "again", "repeats": 2},
    ]


def evaluate(folder: Path, model: str, arguments: dict[str, Any], **options: Any) -> Any:
    """The results of lm_eval for one of its models, on the tasks over `folder` unless `options`
    names others."""
    from lm_eval import simple_evaluate
    from lm_eval.api.registry import model_registry

    import lm_eval.models  # noqa: F401  # isort: skip

    if "chatjobs" not in model_registry:
        model_registry.register("chatjobs", target="jobs.lm_eval.model:QueueLM")
    return simple_evaluate(
        model=model,
        model_args=arguments,
        device="cpu",
        bootstrap_iters=0,
        **{"tasks": tasks(folder), **options},
    )


def compare(ours: Any, theirs: Any) -> None:
    """Assert that the answers and the figures of two results are equal."""
    assert ours["samples"].keys() == theirs["samples"].keys()
    for task, samples in theirs["samples"].items():
        for own, other in zip(ours["samples"][task], samples, strict=True):
            where = f"{task}, document {other['doc_id']}"
            for own_answers, answers in zip(own["resps"], other["resps"], strict=True):
                for answer, wanted in zip(own_answers, answers, strict=True):
                    if isinstance(wanted, tuple):
                        assert answer[0] == pytest.approx(wanted[0], abs=TOLERANCE), where
                        assert answer[1] == wanted[1], where
                    elif isinstance(wanted, float):
                        assert answer == pytest.approx(wanted, rel=TOLERANCE), where
                    else:
                        assert answer == wanted, where
        for metric, value in theirs["results"][task].items():
            if isinstance(value, float):
                assert ours["results"][task][metric] == pytest.approx(value, rel=TOLERANCE), metric
