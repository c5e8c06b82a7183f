"""Types that no kernel multiplies with: messages about them, their cost, and the option to keep
them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader

from jobs import JobError
from tests.worker.checkpoints import make_checkpoint
from tests.worker.gguf.blocks import make_type_file, make_wide
from worker import Engine
from worker import device as devices
from worker.kernels import library


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if library.active() is None:
        pytest.skip("this machine has no kernels")
    folder = tmp_path_factory.mktemp("iq3")
    return make_type_file(make_wide(folder / "wide"), folder / "it.gguf", Type.IQ3_S)


def test_the_log_says_what_is_reencoded(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Engine.load(str(file), device="cpu").close()
    assert "IQ3_S x" in caplog.text
    assert "re-encoded as Q8_0 (+" in caplog.text


@pytest.mark.parametrize(
    ("options", "kind", "remedy"),
    [
        ({"keep_quantised": True}, "IQ3_S", "leave out --keep-quantised"),
        ({"dtype": "float16"}, "IQ3_S", "use --dtype bfloat16"),
        (
            {"dtype": "float16", "keep_quantised": True},
            "IQ3_S",
            "use --dtype bfloat16 without --keep-quantised",
        ),
        ({}, "IQ3_S", None),
    ],
)
def test_a_warning_says_what_is_slow_and_what_to_do(
    file: Path,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    kind: str,
    remedy: str | None,
) -> None:
    Engine.load(str(file), device="cpu", **options).close()
    warned = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    slow = (
        f"{file}: slow, because weights in {kind} are dequantised for each product, which can take "
        f"30 times as long: {remedy}"
    )
    assert warned == ([] if remedy is None else [slow])


def test_plain_weights_that_are_quantised_for_nothing_are_a_warning_as_well(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Engine.load("demo", device="cpu", dtype="float16", quantize="q8").close()
    assert "demo: slow, because weights in Q8_0 are dequantised" in caplog.text


def test_without_kernels_the_warning_names_them(
    file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "active", lambda: None)
    Engine.load(str(file), device="cpu").close()
    assert "as long: install what the line about kernels names" in caplog.text


def test_reencoding_is_part_of_the_fingerprint(file: Path) -> None:
    again, kept, twice = (
        Engine.load(str(file), device="cpu", keep_quantised=keep) for keep in (False, True, False)
    )
    assert again.info.fingerprint != kept.info.fingerprint
    assert again.info.fingerprint == twice.info.fingerprint
    assert "Q8_0" in again.info.dtype
    assert "IQ3_S" in kept.info.dtype
    assert again.info.weight_bytes > kept.info.weight_bytes
    ids = list(range(3, 40))
    ours, exact = (engine.prompt_logits(ids).float() for engine in (again, kept))
    assert float((ours - exact).norm() / exact.norm()) < 0.1


def test_what_does_not_fit_is_refused_with_the_numbers_and_the_remedy(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Engine.load(str(file), device="cpu", keep_quantised=True)
    kept.close()
    room = kept.info.weight_bytes + 1
    monkeypatch.setattr(devices, "free_bytes", lambda device: room)
    with pytest.raises(JobError, match=r"--keep-quantised \(slow, needs \d+\.\d GiB\)") as caught:
        Engine.load(str(file), device="cpu")
    assert caught.value.code == "out_of_memory"
    Engine.load(str(file), device="cpu", keep_quantised=True).close()


def test_a_tied_head_counts_beside_the_blocks_of_its_embedding(tmp_path: Path) -> None:
    if library.active() is None:
        pytest.skip("this machine has no kernels")
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    checkpoint = make_checkpoint(tmp_path / "tied", "llama", tie_word_embeddings=True, **sizes)
    file = make_type_file(checkpoint, tmp_path / "it.gguf", Type.IQ3_S)
    again, kept = (
        Engine.load(str(file), device="cpu", keep_quantised=keep).info.weight_bytes
        for keep in (False, True)
    )
    matrices = [one for one in GGUFReader(file).tensors if one.tensor_type == Type.IQ3_S]
    others = sum(int(one.n_bytes) for one in matrices if one.name != "token_embd.weight")
    assert others < sum(int(one.n_bytes) for one in matrices), "the head is tied"
    assert again - kept == sum(int(one.n_elements) // 32 * 34 for one in matrices) - others
