"""Memory of the device: what models and caches take, and what happens where it ends."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree

import pytest
import torch

from jobs.api.sampling import Sampling
from jobs.errors import JobError
from jobs.operations import CHAT
from tests.gpu.conftest import DEVICE, Load
from tests.worker.engine.chat_requests import WaitingSink, ask
from worker import Engine
from worker.backend import Reservation
from worker.cache_memory import alone
from worker.device import Device, choose_device
from worker.engine.engine import EngineCore
from worker.engine.slots import Slots
from worker.host.engine_host import EngineHost
from worker.loading.description import describe
from worker.loading.find import find
from worker.loading.host_memory import HostMemory
from worker.loading.load import HostModels
from worker.loading.load import load as load_model
from worker.loading.preflight import Preflight, preflight
from worker.memory_amount import MemoryAmount
from worker.model_spec import ModelSpec

pytestmark = pytest.mark.skipif(not DEVICE.startswith("cuda"), reason="measures CUDA's memory")
GREEDY = Sampling(temperature=0, max_tokens=8, ignore_eos=True)
MIB = 2**20
# 14 million parameters, whose cache takes 8 KiB for each token in bf16.
MIDDLE = {
    **{"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 128},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072},
}


@pytest.fixture
def path(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3", **MIDDLE)


@pytest.fixture
def little(path: Path) -> Iterator[Callable[[int], None]]:
    """Limits what this process may allocate to so many bytes more than it has."""
    device = choose_device(DEVICE)
    total = torch.cuda.get_device_properties(device).total_memory

    def limit(nbytes: int) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        share = (torch.cuda.memory_reserved(device) + nbytes) / total
        torch.cuda.set_per_process_memory_fraction(share, device)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0, device)


def checked(path: Path) -> Preflight:
    device = Device(choose_device(DEVICE))
    source = find(str(path))
    spec = ModelSpec(reference=str(path))
    with source.weights() as weights:
        return preflight(describe(source, None), spec, device, weights)


def test_the_numbers_of_a_preflight(path: Path) -> None:
    before = torch.cuda.memory_allocated(DEVICE)
    said = checked(path)
    free, total = torch.cuda.mem_get_info(DEVICE)
    assert 0 < said.free_bytes <= total and abs(said.free_bytes - free) < 4 * 2**30
    assert said.longest == 131_072
    engine = Engine.load(str(path), device=DEVICE, max_batch=2)
    taken = torch.cuda.memory_allocated(DEVICE) - before
    assert said.weight_bytes == engine.info.weight_bytes
    assert said.weight_bytes <= taken < 1.1 * said.weight_bytes + MIB
    assert engine.info.device_name == torch.cuda.get_device_name(DEVICE)
    engine.generate([[7] * 1000], GREEDY)
    held = engine._core.held
    used = torch.cuda.memory_allocated(DEVICE) - before
    assert held.cache <= held.cache_limit < total
    # Besides weights and cache: tables of positions, and the workspace of cuBLAS.
    assert taken + held.cache <= used < taken + held.cache + 64 * MIB
    engine.close()
    del engine
    gc.collect()
    assert torch.cuda.memory_allocated(DEVICE) - before < 40 * MIB


def test_a_model_that_does_not_fit_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.device.free_bytes", lambda device: 10 * MIB)
    with pytest.raises(JobError, match="for its weights in bfloat16 and cuda:0 has") as caught:
        Engine.load(str(path), device=DEVICE)
    assert caught.value.code == "out_of_memory"


def test_no_memory_for_the_weights(path: Path, little: Callable[[int], None]) -> None:
    little(4 * MIB)
    with pytest.raises(JobError, match="too little memory on cuda:0") as caught:
        Engine.load(str(path), device=DEVICE)
    assert caught.value.code == "out_of_memory"


def test_a_cache_larger_than_the_device(
    path: Path, load: Load, little: Callable[[int], None]
) -> None:
    """As many sequences run together as there is memory for; one that never fits is refused."""
    prompts = [[5 + i] * (2000 + i) for i in range(8)]
    options = {"max_batch": 8, "prefix_cache": False}
    first = load(path, **options)
    expected = [one.token_ids for one in first.generate(prompts, GREEDY)]
    first.close()
    engine = load(path, **options, cache_bytes=2**50)
    little(224 * MIB)  # 9 slots of 2,048 columns take 288 MiB in float32
    assert [one.token_ids for one in engine.generate(prompts, GREEDY)] == expected
    with pytest.raises(JobError, match=r"no memory for .* tokens: .*; shorten") as caught:
        engine.generate([[7] * 60_000], GREEDY)
    assert caught.value.code == "out_of_memory"
    assert [one.token_ids for one in engine.generate(prompts[:1], GREEDY)] == expected[:1]


def test_a_cache_limit_that_no_sequence_fits_in(path: Path, load: Load) -> None:
    engine = load(path, dtype="bf16", cache_bytes=8 * MIB)
    with pytest.raises(JobError, match=r"needs .* MB of KV cache, the limit is 8.4 MB"):
        engine.generate([[7] * 2000], GREEDY)


def test_a_step_that_lacks_memory_runs_its_sequences_one_at_a_time(
    path: Path, load: Load, little: Callable[[int], None]
) -> None:
    engine = load(path, dtype="bf16", max_batch=4, prefix_cache=False)
    prompts = [[5 + i] * 4000 for i in range(4)]
    expected = [one.token_ids for one in engine.generate(prompts, GREEDY)]
    little(112 * MIB)  # the activations of 8,192 tokens take more
    found = [one.token_ids for one in engine.generate(prompts, GREEDY)]
    assert [len(one) for one in found] == [8] * 4
    assert found[0] == expected[0]


def test_a_device_beyond_the_last_one_is_refused() -> None:
    count = torch.cuda.device_count()
    for index in (count, 128, 256):  # torch takes an index modulo 256
        with pytest.raises(JobError, match=f"'cuda:{index}' is not available: .*cuda:{count - 1}"):
            choose_device(f"cuda:{index}")


def test_a_swap_back_comes_from_pinned_memory(path: Path) -> None:
    """The copy is filled by the load, stays beside the model on the GPU, and needs no file."""
    host: HostModels = HostMemory(2**30)
    spec, device = ModelSpec(reference=str(path)), Device(choose_device(DEVICE))
    first = load_model(spec, device, host)
    (size,) = host.kept.values()
    assert size >= first.info.weight_bytes
    prompt = [[7] * 100]
    with torch.inference_mode():
        before = torch.cuda.memory_allocated(DEVICE)
        info = first.info
        del first
        gc.collect()
        assert before - torch.cuda.memory_allocated(DEVICE) > 0.9 * info.weight_bytes
    second = load_model(spec, device, host)
    assert second.info == info and [*host.kept.values()] == [size]
    engine = Engine.load(str(path), device=DEVICE)
    cores = EngineCore(second, slots=Slots(1), context=1024, share=alone(64 * MIB))
    expected = [one.token_ids for one in engine.generate(prompt, GREEDY)]
    assert [one.token_ids for one in Engine(cores).generate(prompt, GREEDY)] == expected


def test_the_caches_of_two_models_share_the_memory(path: Path, tmp_path: Path) -> None:
    """Under a budget: what one has used, the other one gets."""
    copytree(path, tmp_path / "twin")
    probe = EngineHost(device=DEVICE)
    specs = [ModelSpec(reference=str(one), max_batch=4) for one in (path, tmp_path / "twin")]
    found = [probe.footprint(one) for one in specs]
    probe.close()
    total = 4 * found[0].least_cache
    budget = sum(one.weights + one.activations for one in found) + total
    host = EngineHost(device=DEVICE, memory=MemoryAmount(nbytes=budget))
    names = []
    for spec, one in zip(specs, found, strict=True):
        fixed = one.weights + one.activations
        host.reserve(spec, Reservation(fixed, one.least_cache, total // 2))
        names.append(host.load(spec).name)
    try:
        for name in names:
            for seed in range(16):
                sink = WaitingSink()
                text = " ".join(str(seed * 1000 + number) for number in range(150))
                asked = ask(text, max_tokens=4, temperature=0, ignore_eos=True)
                host.submit(CHAT, asked.model_copy(update={"model": name}), sink)
                assert sink.wait().usage is not None
                assert sum(one.cache for one in host.device.held) <= total
        first, second = (one.cache for one in host.device.held)
        assert second > total / 3 > 0 < first
    finally:
        host.close()
