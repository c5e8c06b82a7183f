"""Prompt caches in files: what a loaded one gives, and which files are refused."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.api.sampling import Sampling
from jobs.errors import JobError
from tests.worker.checkpoints import make_checkpoint
from worker import Engine
from worker.device import computing, threads_of
from worker.engine.plan import StepPlan
from worker.host.engine_host import EngineHost
from worker.layers.batch import Batch, Span
from worker.model_spec import ModelSpec

FAMILIES = {
    "full": "llama",
    "window": "gemma3_text",
    "recurrent": "qwen3_next",
    "recurrent, dense": "qwen3_5_text",
    "window and sinks": "gpt_oss",
}
SYSTEM = [5 + i % 90 for i in range(101)]
NEXT = [101, 102, 103, 7, 8]
GREEDY = Sampling(temperature=0, max_tokens=4, ignore_eos=True)

Load = Callable[..., Engine]
Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), FAMILIES[request.param])


def load(folder: Path, *, dtype: str = "fp32", max_batch: int = 4, **options: Any) -> Engine:
    return Engine.load(str(folder), device="cpu", dtype=dtype, max_batch=max_batch, **options)


def cached(engine: Engine) -> int:
    return engine._core.prefix.cached_tokens


def first_logits(engine: Engine, monkeypatch: pytest.MonkeyPatch, prompt: list[int]) -> Any:
    """The logits of the first forward pass for a prompt, and the positions that it computes."""
    seen: list[tuple[list[int], torch.Tensor]] = []
    model: Any = engine._core.runner.model

    def watched(batch: Batch, caches: Any) -> torch.Tensor:
        logits: torch.Tensor = model(batch, caches)
        seen.append((batch.positions.tolist(), logits.clone()))
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(engine._core.runner, "model", watched)
        engine.generate([prompt], GREEDY)
    return seen[0]


@torch.inference_mode()
def logits_after(engine: Engine, prompt: list[int], more: list[int]) -> torch.Tensor:
    """The logits of `more`, computed in the slot that computed `prompt` as for a file."""
    core = engine._core
    slot = core.book.acquire()
    assert slot is not None and core.book.reserve(slot, len(prompt) + len(more))
    core.book.begin(slot)
    for start in [*range(0, len(prompt), 64), len(prompt)]:
        end = min(start + 64, len(prompt)) if start < len(prompt) else len(prompt) + len(more)
        ids = [*prompt, *more][start:end]
        span = Span(slot, start, ids, len(prompt) + len(more))
        with computing(core.device, threads_of(core.info.weight_bytes)):
            logits = core.runner.forward(StepPlan(core.book.take_changes(), (span,)))
    core.book.release(slot)
    return logits


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_loaded_one_has_the_bits_of_the_state_that_was_saved(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    saving, loading = load(folder, dtype=dtype), load(folder, dtype=dtype)
    file = tmp_path / "system.safetensors"
    assert saving.save_prompt_cache(SYSTEM, file) == len(SYSTEM)
    assert loading.load_prompt_cache(file) == len(SYSTEM)
    positions, logits = first_logits(loading, monkeypatch, SYSTEM + NEXT)
    assert positions == [*range(len(SYSTEM), len(SYSTEM + NEXT))]
    assert torch.equal(logits, logits_after(saving, SYSTEM, NEXT))
    assert [*tmp_path.iterdir()] == [file]


def test_at_max_batch_1_a_loaded_one_changes_no_bit(folder: Path, tmp_path: Path) -> None:
    exact = GREEDY.model_copy(update={"logprobs": True, "top_logprobs": 3})
    load(folder, dtype="bf16").save_prompt_cache(SYSTEM, tmp_path / "f")
    engine = load(folder, dtype="bf16", max_batch=1)
    plain = load(folder, dtype="bf16", max_batch=1, prefix_cache=False)
    engine.load_prompt_cache(tmp_path / "f")
    assert engine.generate([SYSTEM + NEXT], exact) == plain.generate([SYSTEM + NEXT], exact)
    assert cached(engine) == 64


def test_a_loaded_one_is_never_evicted_and_serves_all_salts(folder: Path, tmp_path: Path) -> None:
    load(folder).save_prompt_cache(SYSTEM, tmp_path / "f")
    probe = load(folder)
    limit = probe._core.book.bytes_for_one(360) * 2
    engine = load(folder, cache_bytes=limit)
    engine.load_prompt_cache(tmp_path / "f")
    store = engine._core.book.kept
    assert 0 < store.pinned_bytes == store.nbytes
    for number in range(12):
        engine.generate([[9 + number] * 200], GREEDY)
    assert engine._core.book.bytes_held <= limit
    plain = load(folder, prefix_cache=False).generate([SYSTEM + NEXT], GREEDY)
    before = cached(engine)
    assert engine.generate([SYSTEM + NEXT], GREEDY) == plain
    assert cached(engine) - before == len(SYSTEM)
    core = engine._core
    for salt, expected in (("a", len(SYSTEM)), ("b", len(SYSTEM)), ("a", None)):
        before = cached(engine)
        sequence = engine._sequence(
            SYSTEM + NEXT * 9, core.sampling_params(GREEDY, SYSTEM), 0, lambda _: None
        )
        sequence.salt = salt
        core.add([sequence])
        while not sequence.ended:
            engine.step()
        found = cached(engine) - before
        assert found == expected if expected is not None else found > len(SYSTEM)


def test_one_that_does_not_fit_is_refused_with_the_numbers(path: Path, tmp_path: Path) -> None:
    load(path).save_prompt_cache(SYSTEM, tmp_path / "f")
    need = load(path)._core.book.bytes_for_one
    small = load(path, cache_bytes=need(101))
    with pytest.raises(JobError, match=r"does not fit: it has .* MiB") as caught:
        small.load_prompt_cache(tmp_path / "f")
    assert caught.value.code == "out_of_memory"
    tight = load(path, cache_bytes=need(101 + 256) + 2 * need(101))
    tight.load_prompt_cache(tmp_path / "f")
    assert len(tight.generate([SYSTEM + NEXT], GREEDY)[0].token_ids) == 4
    with pytest.raises(JobError, match=r"of which prompt caches have .* kB"):
        tight.generate([[9] * 500], GREEDY)


def test_messages_are_saved_up_to_where_conversations_differ(path: Path, tmp_path: Path) -> None:
    engine = load(path)
    system = {"role": "system", "content": "You answer questions about the weather. " * 3}
    count = engine.save_prompt_cache([system], tmp_path / "f")
    engine.load_prompt_cache(tmp_path / "f")
    turn = {"role": "user", "content": "Will it rain?"}
    answer = engine.chat({"model": "m", "messages": [system, turn], "max_tokens": 2})
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == count > 30


@pytest.fixture(scope="module")
def saved(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("saved") / "system.safetensors"
    load(path).save_prompt_cache(SYSTEM, file)
    return file


def rewrite(source: Path, target: Path, change: Change) -> Path:
    """A copy of a file with another header."""
    data = source.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    target.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return target


def metadata(**values: str) -> Change:
    return lambda header: header["__metadata__"].update(values)


def reshaped(header: dict[str, Any]) -> None:
    shape = header["layers.1.keys"]["shape"]
    shape[0], shape[2] = shape[0] // 2, shape[2] * 2


def renamed(header: dict[str, Any]) -> None:
    header["layers.7.keys"] = header.pop("layers.1.keys")


REFUSED: dict[str, tuple[Change, str]] = {
    "other model": (metadata(fingerprint="00", model="other"), "another model: other"),
    "other dtype": (metadata(dtype="bfloat16"), "another dtype: bfloat16, and .* float32"),
    "other kinds": (metadata(cache_kinds='["recurrent"]'), "other cache kinds .*: recurrent,"),
    "other shape": (reshaped, r"other shapes .*: layers.1.keys is F32 \[1, 101, 32\]"),
    "other tensors": (renamed, "other tensors .*: it lacks layers.1.keys"),
    "newer version": (metadata(version="2"), "version 2 of the format, .* reads version 1"),
    "no prompt cache": (lambda header: header.pop("__metadata__"), "is no prompt cache"),
    "token ids": (metadata(token_ids=json.dumps([*SYSTEM[:-1], 10**6])), "got id 1000000"),
    "negative token ids": (metadata(token_ids=json.dumps([*SYSTEM[:-1], -1])), "got id -1"),
    "malformed token ids": (metadata(token_ids='["1"]'), "metadata is malformed"),
    "deep metadata": (metadata(cache_kinds="[" * 90_000), "metadata is malformed"),
    "fewer token ids": (metadata(token_ids=json.dumps(SYSTEM[:50])), "other shapes"),
    "snapshots": (metadata(snapshots="[200]"), "snapshots after"),
    "salt": (metadata(salt="ab"), "cache_salt"),
    "checksum": (metadata(crc32="0"), "checksum"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_files_are_refused_with_the_difference(
    engine: Engine, saved: Path, tmp_path: Path, case: str
) -> None:
    change, sentence = REFUSED[case]
    file = rewrite(saved, tmp_path / "f", change)
    with pytest.raises(JobError, match=sentence) as caught:
        engine.load_prompt_cache(file)
    assert caught.value.code == "invalid_request" and str(file) in caught.value.message
    assert engine._core.book.kept.pinned_bytes == 0


@pytest.mark.parametrize("bytes_left", [0, 5, 100, 5000, -1])
def test_truncated_files_are_refused(
    engine: Engine, saved: Path, tmp_path: Path, bytes_left: int
) -> None:
    (tmp_path / "f").write_bytes(saved.read_bytes()[:bytes_left])
    with pytest.raises(JobError, match=r"truncated|has only|its header has"):
        engine.load_prompt_cache(tmp_path / "f")


def test_a_changed_byte_of_a_tensor_is_found(engine: Engine, saved: Path, tmp_path: Path) -> None:
    data = bytearray(saved.read_bytes())
    data[-5] ^= 1
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(JobError, match="checksum"):
        engine.load_prompt_cache(tmp_path / "f")


def test_a_changed_token_of_the_header_is_found(
    engine: Engine, saved: Path, tmp_path: Path
) -> None:
    changed = b",".join(str(one).encode() for one in [SYSTEM[0] ^ 1, *SYSTEM[1:]])
    data = saved.read_bytes().replace(b",".join(str(one).encode() for one in SYSTEM), changed)
    assert len(data) == saved.stat().st_size and data != saved.read_bytes()
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(JobError, match="checksum"):
        engine.load_prompt_cache(tmp_path / "f")


def test_tensors_that_changed_places_are_found(engine: Engine, saved: Path, tmp_path: Path) -> None:
    data = saved.read_bytes()
    for one, other in ((b"layers.0.keys", b"-"), (b"layers.1.keys", b"layers.0.keys")):
        data = data.replace(one, other)
    (tmp_path / "f").write_bytes(data.replace(b'"-"', b'"layers.1.keys"'))
    with pytest.raises(JobError, match="checksum"):
        engine.load_prompt_cache(tmp_path / "f")


def test_a_pipe_is_no_file(engine: Engine, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f")
    with pytest.raises(JobError, match="no regular file"):
        engine.load_prompt_cache(tmp_path / "f")


def test_other_mistakes_are_refused(engine: Engine, path: Path, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="cannot be opened"):
        engine.load_prompt_cache(tmp_path / "none")
    with pytest.raises(JobError, match="at least 16 tokens, got 3"):
        engine.save_prompt_cache([1, 2, 3], tmp_path / "f")
    with pytest.raises(JobError, match="vocabulary"):
        engine.save_prompt_cache([10**6] * 20, tmp_path / "f")
    with pytest.raises(JobError, match="context of 512"):
        engine.save_prompt_cache([9] * 600, tmp_path / "f")
    with pytest.raises(JobError, match="can't be written"):
        engine.save_prompt_cache(SYSTEM, tmp_path / "none" / "f")
    short = load(path)
    short.save_prompt_cache(SYSTEM[:40], tmp_path / "short")
    with pytest.raises(JobError, match="in pieces of 64"):
        load(path, max_batch=1).load_prompt_cache(tmp_path / "short")
    with pytest.raises(JobError, match="prefix cache, which is off"):
        load(path, prefix_cache=False).load_prompt_cache(tmp_path / "short")


def test_a_worker_with_a_file_of_another_model_loads_nothing(saved: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", num_hidden_layers=1, seed=1)
    host = EngineHost(device="cpu")
    spec = ModelSpec(reference=str(other), dtype="fp32", prompt_caches=(saved,))
    with pytest.raises(JobError, match=r"another model: .* and this is other"):
        host.load(spec)
    assert host.memory().weights == 0 and host.health().alive
    host.close()


def test_another_configuration_is_another_model(tmp_path: Path) -> None:
    one = make_checkpoint(tmp_path / "m", "qwen3")
    load(one).save_prompt_cache(SYSTEM, tmp_path / "f")
    config = json.loads((one / "config.json").read_text())
    (one / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    with pytest.raises(JobError, match="another model"):
        load(one).load_prompt_cache(tmp_path / "f")


def test_a_file_opens_in_the_safetensors_library(saved: Path, engine: Engine) -> None:
    from safetensors.torch import load_file

    tensors = load_file(saved)
    with engine._state_of(SYSTEM) as state:
        views = [block.views()[0] for block in state.blocks]
    assert torch.equal(tensors["layers.0.keys"], torch.cat(views, dim=1))
    assert saved.stat().st_mode & 0o777 == 0o600


def test_a_refusal_is_said_once(engine: Engine, saved: Path, tmp_path: Path) -> None:
    data = bytearray(saved.read_bytes())
    data[-5] ^= 1
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(JobError) as caught:
        engine.load_prompt_cache(tmp_path / "f")
    assert caught.value.message.count(str(tmp_path / "f")) == 1


def test_a_path_that_cannot_be_written_is_the_callers_mistake(
    engine: Engine, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match="No such file") as caught:
        engine.save_prompt_cache(SYSTEM, tmp_path / "absent" / "f")
    assert (caught.value.code, caught.value.retryable) == ("invalid_request", False)
