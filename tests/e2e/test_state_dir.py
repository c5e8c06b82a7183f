"""State in files through a real Redis and real workers."""

from __future__ import annotations

from pathlib import Path

from jobs.api.answer import ChatCompletion
from tests.worker.checkpoints import make_checkpoint
from tests.worker.site import Site
from worker import Engine

SYSTEM = "You answer questions about the weather. " * 8


def cached(completion: ChatCompletion) -> int:
    usage = completion.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens


def test_a_restarted_worker_continues_a_session_with_its_state(site: Site, tmp_path: Path) -> None:
    folder, states = make_checkpoint(tmp_path / "m", num_hidden_layers=1), tmp_path / "states"
    options = {"real": True, "models": [str(folder)], "state_dir": str(states)}
    worker = site.worker(**options)
    session = site.client.session(model="m", system=SYSTEM, max_tokens=4, temperature=0)
    assert cached(session.send("Rain?")) == 0
    assert worker.stop() == 0
    (file,) = states.iterdir()
    worker = site.worker(**options)
    turn = session.send("Snow?")
    assert turn.usage is not None and turn.usage.prompt_tokens - 32 < cached(turn)
    assert worker.stop() == 0
    assert [*states.iterdir()] == [file]


def test_a_worker_begins_with_a_prompt_cache(site: Site, tmp_path: Path) -> None:
    folder, file = make_checkpoint(tmp_path / "m", num_hidden_layers=1), tmp_path / "system"
    engine = Engine.load(str(folder), device="cpu", dtype="fp32")
    count = engine.save_prompt_cache([{"role": "system", "content": SYSTEM}], file)
    worker = site.worker(real=True, models=[str(folder)], prompt_caches=[str(file)])
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Rain?"}]
    for salt in ("a", "b", None):
        request = {"model": "m", "messages": messages, "max_tokens": 2, "cache_salt": salt}
        assert cached(site.client.submit(request).result(timeout=60)) >= count
    assert worker.stop() == 0
