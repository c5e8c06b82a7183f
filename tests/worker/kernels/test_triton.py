"""The Triton kernels of attention, delta nets, norms, activations, mixtures and draws, in Triton's
interpreter on the CPU against torch. `make triton` installs the package and runs this; tests/gpu
runs them compiled."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.worker.kernels.nets import HIDDEN, filled_net
from worker.kernels import gpu, library
from worker.kernels.attention import PAGE, Stored
from worker.layers.batch import Batch, Span
from worker.layers.cache import pages_for
from worker.layers.delta_net import DeltaShape
from worker.layers.experts import combine, group
from worker.layers.graphs import Graph
from worker.layers.replay import Inputs
from worker.layers.rope import Rotation

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs the package triton: make triton"
)
SCALE = 0.3


@pytest.fixture(autouse=True, scope="module")
def interpreter() -> Iterator[None]:
    """Read when the kernels are defined, by the first import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield


def attended(
    q: Tensor, keys: Tensor, values: Tensor, cap: float | None, sink: Tensor | None, seen: Tensor
) -> Tensor:
    """q [heads, n, dim] over keys and values [kv_heads, columns, dim] where `seen` [n, columns] →
    [n, heads * dim], in float64."""
    repeats = len(q) // len(keys)
    wide = keys.repeat_interleave(repeats, 0).double(), values.repeat_interleave(repeats, 0)
    scores = q.double() @ wide[0].mT * SCALE
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sink is not None:
        more = sink.double().view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, more], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    return (weights @ wide[1].double()).transpose(0, 1).flatten(1)


def stored_of(slots: int, kv_heads: int, columns: int, dim: int, window: int | None) -> Stored:
    """Caches with random values: in pages that lie apart from each other, without a window."""
    if window is not None:
        keys, values = torch.randn(2, slots, kv_heads, columns, dim)
        return Stored(keys, values, window)
    count = pages_for(columns)
    table = torch.randperm(slots * count + 3)[: slots * count].view(slots, count)
    keys, values = torch.randn(2, slots * count + 3, kv_heads, PAGE, dim)
    return Stored(keys, values, None, table.to(torch.int32))


def copied(stored: Stored) -> Stored:
    return replace(stored, keys=stored.keys.clone(), values=stored.values.clone())


def columns_of(stored: Stored) -> tuple[Tensor, Tensor]:
    """Copies of keys and values [slots, kv_heads, columns, dim]."""
    if stored.pages is None:
        return stored.keys.clone(), stored.values.clone()
    keys, values = (
        part[stored.pages].transpose(1, 2).flatten(2, 3) for part in (stored.keys, stored.values)
    )
    return keys, values


def check_columns(stored: Stored, expected: tuple[Tensor, Tensor]) -> None:
    assert all(torch.equal(*pair) for pair in zip(columns_of(stored), expected, strict=True))


def near(found: Tensor, expected: Tensor) -> None:
    assert float((found.double() - expected).norm() / expected.norm()) < 1e-5


DECODE: dict[str, dict[str, Any]] = {
    "several splits": {"positions": [5, 299, 100, 4], "columns": 700},
    "more columns than splits have": {"positions": [4500, 1], "columns": 4600},
    "one split": {"positions": [5, 199, 100, 4], "columns": 200},
    "a cap": {"positions": [600, 1], "columns": 601, "cap": 3.0, "dim": 8},
    "a window": {"positions": [3, 9, 30, 8], "columns": 64, "window": 9, "dim": 24},
    "sinks": {"positions": [3, 260], "columns": 270, "sinks": True},
    "sinks and a window": {"positions": [3, 30], "columns": 64, "window": 9, "sinks": True},
    "no groups": {"positions": [30, 7], "columns": 64, "heads": 2},
}


@pytest.mark.parametrize("case", DECODE, ids=lambda name: name.replace(" ", "-"))
def test_single_tokens(case: str) -> None:
    """The last row belongs to no sequence: it writes nothing and gives zeros."""
    given = {"heads": 4, "dim": 16, "window": None, "cap": None, "sinks": False, **DECODE[case]}
    heads, dim, window = given["heads"], given["dim"], given["window"]
    positions = torch.tensor([*given["positions"], 1])
    rows, kv_heads = len(positions), 2
    slots = torch.randperm(rows + 1)[:rows]
    slots[-1] = -1
    columns = min(given["columns"], window or given["columns"])
    stored = stored_of(rows + 2, kv_heads, columns, dim, window)
    expected_keys, expected_values = columns_of(stored)
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    sinks = torch.randn(heads) if given["sinks"] else None
    out = torch.full((rows, heads * dim), float("nan"))
    gpu.attention().attend_decode(
        *(q, k, v, stored, slots, positions),
        *(SCALE, given["cap"], sinks, out),
    )
    for row, slot in enumerate(slots[:-1].tolist()):
        position = int(positions[row])
        at = position % window if window else position
        expected_keys[slot, :, at], expected_values[slot, :, at] = k[row], v[row]
        seen = torch.arange(expected_keys.shape[2])[None] <= position
        own = expected_keys[slot], expected_values[slot]
        near(out[row : row + 1], attended(q[row][:, None], *own, given["cap"], sinks, seen))
    assert torch.equal(out[-1], torch.zeros(heads * dim))
    check_columns(stored, (expected_keys, expected_values))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    stored = stored_of(5, 2, 800, 16, None)
    q, kv = torch.randn(5, 4, 16), torch.randn(5, 2, 16)
    found = []
    for rows in (slice(0, 5), slice(0, 1)):
        out = torch.empty(5, 64)[rows]
        at = torch.arange(5)[rows], torch.tensor([700, 3, 100, 799, 0])[rows]
        gpu.attention().attend_decode(
            *(q[rows], kv[rows], kv[rows], copied(stored), *at),
            *(SCALE, None, None, out),
        )
        found.append(out[0])
    assert torch.equal(*found)


@pytest.mark.parametrize(("cap", "sinks"), [(None, False), (3.0, True)], ids=["plain", "all"])
@pytest.mark.parametrize("dim", [16, 24])
def test_chunks(dim: int, cap: float | None, sinks: bool) -> None:
    """First and later ones, of more and of fewer tokens than a program computes."""
    heads, kv_heads = 4, 2
    spans = [Span(3, 0, [1] * 40, 40), Span(1, 7, [1] * 20, 27), Span(0, 100, [1] * 17, 117)]
    batch, ordered = Batch.prepare([Span(2, 5, [1], 6), *spans], torch.device("cpu"))
    tokens = len(batch.token_ids)
    stored = stored_of(5, kv_heads, 130, dim, None)
    expected_keys, expected_values = columns_of(stored)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    sink = torch.randn(heads) if sinks else None
    pieces = batch.pieces(gpu.attention().queries(q))
    assert (len(pieces.table), pieces.high, pieces.longest) == (7, 4, 117)
    out = torch.zeros(tokens, heads * dim)
    gpu.attention().attend_chunks(q, k, v, stored, pieces.table, SCALE, cap, sink, out)
    assert torch.equal(out[0], torch.zeros(heads * dim))  # the single token
    for span, chunk in zip(ordered[1:], batch.chunks, strict=True):
        rows, columns = slice(chunk.row, chunk.row + chunk.length), slice(span.start, span.end)
        expected_keys[span.slot, :, columns] = k[rows].transpose(0, 1)
        expected_values[span.slot, :, columns] = v[rows].transpose(0, 1)
        seen = torch.arange(span.end)[None] <= torch.arange(span.start, span.end)[:, None]
        own = expected_keys[span.slot, :, : span.end], expected_values[span.slot, :, : span.end]
        near(out[rows], attended(q[rows].transpose(0, 1), *own, cap, sink, seen))
    check_columns(stored, (expected_keys, expected_values))


@pytest.mark.parametrize("turned", [0, 16, 12])
@pytest.mark.parametrize("normed", [False, True])
def test_norms_and_positions_of_queries_and_keys(normed: bool, turned: int) -> None:
    qkv = torch.randn(5, 8, 16)
    q, k = qkv[:, :4], qkv[:, 4:6]
    norms = (torch.randn(16), 1e-6), (torch.randn(16), 1e-5)
    cos, sin = torch.randn(2, 5, 1, max(1, turned))
    found = gpu.elementwise().prepare_queries_and_keys(
        q, k, norms if normed else None, (cos, sin) if turned else None
    )
    for x, (weight, eps), prepared in zip((q, k), norms, found, strict=True):
        expected = F.rms_norm(x, (16,), weight, eps) if normed else x
        if turned:
            head = expected[..., :turned]
            head = head * cos + head.roll(turned // 2, -1) * sin
            expected = torch.cat([head, expected[..., turned:]], dim=-1)
        torch.testing.assert_close(prepared, expected, rtol=1e-5, atol=1e-5)


def test_a_sum_and_its_norm() -> None:
    x, delta, weight = torch.randn(7, 100), torch.randn(7, 100), torch.randn(100)
    total, normed = gpu.elementwise().add_rms_norm(x, delta, weight, 1e-6)
    assert torch.equal(total, x + delta)
    torch.testing.assert_close(normed, F.rms_norm(total, (100,), weight, 1e-6))


def test_gated_activations() -> None:
    gate, up = torch.randn(6, 2600).chunk(2, dim=-1)
    gated = gpu.elementwise().gated_activation
    torch.testing.assert_close(gated(gate, up, "silu"), F.silu(gate) * up)
    expected = F.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(gated(gate, up, "gelu_tanh"), expected, rtol=1e-5, atol=1e-5)
    low, near_zero = gate.clamp(max=0.7), up.clamp(-0.7, 0.7)
    expected = (near_zero + 1) * low * torch.sigmoid(1.7 * low)
    torch.testing.assert_close(gated(gate, up, "clamped", slope=1.7, limit=0.7), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_draws_are_those_of_cumulative_sums(dtype: torch.dtype) -> None:
    logits = (torch.randn(40, 10_000) * 3).to(dtype)
    logits[0], logits[1, :9000] = float("-inf"), float("-inf")
    logits[0, 7] = 1.0
    temperatures = torch.rand(40) + 0.3
    uniforms = torch.rand(40, dtype=torch.float64)
    uniforms[2], uniforms[3] = 0.0, 0.999999
    sums = (logits.float() / temperatures[:, None]).softmax(-1).double().cumsum(-1)
    expected = torch.searchsorted(sums, (uniforms * sums[:, -1])[:, None], right=True)[:, 0]
    found = gpu.sampling().draw(logits, temperatures, uniforms)
    assert torch.equal(found, expected.clamp(max=9_999))


@pytest.mark.parametrize("memory", [232_448, 65_536, None])
def test_the_shared_memory_of_a_card(memory: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an H100, a T4, and of one that torch does not tell."""
    given = {} if memory is None else {"shared_memory_per_block_optin": memory}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**given)
    )
    known = gpu.attention()._memory
    known.cache_clear()
    assert known(torch.device("cuda", 0)) == (memory or 0)
    known.cache_clear()


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (5, 3), (300, 1), (4, 4)])
def test_the_experts_of_tokens(experts: int, top_k: int, biased: bool, normalise: bool) -> None:
    logits, bias = torch.randn(7, 2 * experts)[:, ::2], torch.randn(experts)
    found, chosen = gpu.mixture().select(logits, bias if biased else None, top_k, normalise)
    probabilities = (logits + bias if biased else logits).softmax(-1)
    weights, expected = probabilities.topk(top_k)
    assert torch.equal(chosen, expected)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(found, weights)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_strange_logits_of_a_token_choose_experts_that_exist(value: float) -> None:
    logits = torch.randn(3, 6)
    logits[1] = value
    _, chosen = gpu.mixture().select(logits, None, 4, True)
    assert int(chosen.min()) >= 0 and int(chosen.max()) < 6
    assert torch.equal(chosen[::2], logits[::2].topk(4).indices)


@pytest.mark.parametrize("shape", [(1, 8), (40, 2), (300, 1), (70, 8)], ids=str)
def test_rows_in_the_order_of_their_experts(shape: tuple[int, int]) -> None:
    for experts in (3, 128):
        chosen = torch.randint(0, experts, shape)
        found = gpu.mixture().group(chosen, experts)
        assert all(torch.equal(*pair) for pair in zip(found, group(chosen, experts), strict=True))


@pytest.mark.parametrize("counts", [[0, 3, 0, 4, 1], [8, 0, 0, 0, 0], [0, 0, 0, 0, 8]], ids=str)
def test_the_biases_of_experts(counts: list[int]) -> None:
    y, biases = torch.randn(8, 1500), torch.randn(5, 1500)
    expected = y + biases.repeat_interleave(torch.tensor(counts), dim=0)
    gpu.mixture().add_biases(y, biases, torch.tensor(counts))
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize(("top_k", "size"), [(2, 100), (8, 256), (11, 300)])
def test_the_sum_of_the_outputs_of_a_token(top_k: int, size: int) -> None:
    outputs, weights = torch.randn(5 * top_k, size), torch.randn(5, top_k)
    places = torch.randperm(5 * top_k).view(5, top_k)
    found = gpu.mixture().combine(outputs, weights, places)
    near(found, combine(outputs.double(), weights.double(), places))


class Compiled:
    """Stands in for a Triton function and for what it compiles."""

    arg_names = ("x", "y", "number", "width", "kind")

    def __init__(self) -> None:
        self.compiled, self.started = 0, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.start if len(grid) == 3 else self.compile

    def compile(self, *arguments: Any, **options: Any) -> Compiled:
        self.compiled += 1
        return self

    def start(self, *arguments: Any) -> None:
        assert arguments[3:] == (8, 2)
        self.started += 1


def test_a_kernel_is_compiled_for_each_kind_of_arguments() -> None:
    """Those for which Triton makes different code, and no others."""
    from worker.kernels.triton_launch import Kernel

    function = Compiled()
    start, x, y = Kernel(function), torch.zeros(64), torch.zeros(64)
    # The constants are passed in the order of the parameters.
    for number, compiled in ((48, 1), (32, 1), (7, 2), (9, 2), (1, 3), (2**32, 4), (2**33, 4)):
        start((2, 3), x, y, number, kind=2, width=8)
        assert function.compiled == compiled, number
    start((2,), x[4:], y, 48, kind=2, width=8)
    assert function.compiled == 4
    for other in ((x[1:], y, 48), (x.half(), y, 48), (x, y, 4.8)):
        start((2,), *other, kind=2, width=8)
    start((2,), x, y, 48, kind=2, width=8, warps=1)
    assert (function.compiled, function.started) == (8, 4)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delta nets are computed as on GPUs, all else by torch."""
    served = SimpleNamespace(serves=lambda x: True, delta_net=gpu.delta_net)
    monkeypatch.setattr(library, "active", lambda: None)
    monkeypatch.setattr("worker.layers.delta_net.gpu", served)


UNUSED = Rotation(torch.empty(0), torch.empty(0))
NETS = {
    "powers of two": DeltaShape(2, 4, 16, 8, 4),
    "uneven": DeltaShape(3, 3, 20, 70, 2),
    "blocks of values": DeltaShape(1, 3, 256, 40, 5),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NETS, ids=lambda name: name.replace(" ", "-"))
def test_delta_nets(name: str, dtype: torch.dtype, on_gpu: None) -> None:
    """Single tokens beside a chunk, against torch."""
    spans = [Span(3, 7, [1], 8), Span(0, 5, [1], 6), Span(1, 4, [1] * 5, 9)]
    batch, _ = Batch.prepare(spans, torch.device("cpu"))
    x = torch.randn(7, HIDDEN).to(dtype)
    net, cache = filled_net(NETS[name], dtype)
    found = net(x, UNUSED, cache, batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("worker.layers.delta_net.gpu", SimpleNamespace(serves=lambda x: False))
        net, same = filled_net(NETS[name], dtype)
        expected = net(x, UNUSED, same, batch)
    # Roundings of intermediate values may fall the other way.
    tolerance = 0.02 if dtype is torch.bfloat16 else 1e-5
    for ours, theirs in ((found, expected), (cache.state, same.state)):
        assert float((ours - theirs).norm() / theirs.norm()) < tolerance
    assert torch.equal(cache.inputs, same.inputs)


def test_gates_far_from_zero() -> None:
    """Small decays keep their digits, and NaN stays."""
    a = torch.tensor([[-80.0, -30.0, -17.0, -9.0, 0.0, 9.0, 30.0, float("nan")]])
    ones, zeros = torch.ones(8), torch.zeros(8)
    log_decay, beta = gpu.delta_net().gates(a, a, ones, zeros)
    torch.testing.assert_close(
        log_decay.double(), F.softplus(a.double()), rtol=1e-5, atol=0, equal_nan=True
    )
    torch.testing.assert_close(beta, a.sigmoid(), equal_nan=True)


def test_rows_of_no_sequence_change_no_state(on_gpu: None) -> None:
    """They give zeros, and the other rows do not depend on them."""
    net, cache = filled_net(NETS["powers of two"], torch.float32)
    u, g, beta = torch.randn(4, 96), -torch.rand(4, 4), torch.rand(4, 4)
    u[1] = float("nan")
    output = net._decode(u, g, beta, cache, torch.tensor([2, -1, 0, -1]))
    net, alone = filled_net(NETS["powers of two"], torch.float32)
    expected = net._decode(u[::2], g[::2], beta[::2], alone, torch.tensor([2, 0]))
    assert torch.equal(output[::2], expected)
    assert torch.equal(output[1::2], torch.zeros(2, 4, 8))
    assert torch.equal(cache.state, alone.state)
    assert torch.equal(cache.inputs, alone.inputs)


def test_a_graph_advances_each_state_once(on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when it is made. A fourth row fills it up."""
    spans = [Span(slot, 7, [1], 8) for slot in (0, 1, 3)]
    batch, _ = Batch.prepare(spans, torch.device("cpu"))
    x = torch.randn(3, HIDDEN)
    net, cache = filled_net(NETS["powers of two"], torch.float32)
    captured = SimpleNamespace(
        capture_begin=lambda *_, **options: None,
        capture_end=lambda: None,
        replay=lambda: graph._out.copy_(compute(given[-1])),
    )
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: captured)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    given: list[Inputs] = []

    def compute(inputs: Inputs) -> Tensor:
        given.append(inputs)
        assert inputs.x is not None
        return net(inputs.x, UNUSED, cache, inputs.batch)

    other, expected = filled_net(NETS["powers of two"], torch.float32)
    graph: Graph = Graph(compute, Inputs(batch, x), 4, None)
    assert torch.equal(cache.state, expected.state)
    assert torch.equal(cache.inputs, expected.inputs)
    for _ in range(2):
        found = graph(Inputs(batch, x)), other(x, UNUSED, expected, batch)
        torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(cache.state, expected.state, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("script", "count"), [("compile_attention", 4 * 2 * 2), ("compile_delta_net", 4 * 2 * 4)]
)
def test_the_kernels_fit_in_the_shared_memory_of_cards(
    script: str, count: int, tmp_path: Path
) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    del environment["TRITON_INTERPRET"]
    done = subprocess.run(
        [sys.executable, "-m", f"tests.worker.kernels.{script}"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == count
    assert [line for line in lines if int(line[3]) > int(line[4])] == []
