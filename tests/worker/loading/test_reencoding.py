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
