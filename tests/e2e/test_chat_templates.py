"""A model without a chat template: said before the first job, with remedies that work. And the
template of a request, which workers take if their command line says so."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from jobs import AsyncClient, ChatRequest, JobError
from jobs.api.chat_template import not_taken, template_hash
from jobs.cli import build
from jobs.store.worker_status import read_workers
from tests.jobs.gateway.in_process import ask
from tests.worker.checkpoints import make_checkpoint
from tests.worker.gguf.converter import convert
from tests.worker.site import PATIENCE, Site, wait_until
from tests.worker.sources import read_tokenizer
from tests.worker.templates import CHATML
from worker import Engine

COMMAND = str(Path(sys.executable).parent / "chatjobs")
MISSING = (
    "has no chat template: use a chat (instruct) checkpoint, put a chat_template.jinja into its "
    "folder, or start it with --chat-template FILE"
)
REQUEST = ChatRequest(model="m", messages=[{"role": "user", "content": "Hi"}], max_tokens=1)


def make_file(folder: Path) -> Path:
    checkpoint = make_checkpoint(folder / "hf", num_hidden_layers=1)
    edited = json.loads((checkpoint / "tokenizer_config.json").read_text())
    del edited["chat_template"]
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(edited))
    return convert(checkpoint, folder / "model" / "bare.gguf")


def make_folder(folder: Path) -> Path:
    make_file(folder)
    return folder / "hf"


def run(*words: str) -> Result:
    return CliRunner().invoke(build(), words)


@pytest.fixture(params=[make_file, make_folder])
def bare(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make: Callable[[Path], Path] = request.param
    return make(tmp_path)


def test_models_check_says_so_and_the_remedies_work(bare: Path, tmp_path: Path) -> None:
    check = ("models", "check", str(bare), "--device", "cpu")
    done = run(*check)
    assert done.exit_code == 1
    assert "template    none: chat requests fail" in done.stdout
    assert f"{bare} {MISSING}" in done.stderr
    facts = json.loads(run(*check, "--json").stdout)
    assert (facts["chat_template"], facts["obstacle"]) == (False, f"{bare} {MISSING}")
    with pytest.raises(JobError, match="has no chat template"):
        Engine.load(str(bare), device="cpu").chat(REQUEST)

    template = tmp_path / "chat.jinja"
    template.write_text(CHATML)
    assert run(*check, "--chat-template", str(template)).exit_code == 0
    engine = Engine.load(str(bare), device="cpu", chat_template=template)
    prompt = engine.prompt_ids(REQUEST)

    beside = (bare if bare.is_dir() else bare.parent) / "chat_template.jinja"
    beside.write_text(CHATML)
    assert run(*check).exit_code == 0
    assert Engine.load(str(bare), device="cpu").prompt_ids(REQUEST) == prompt


def test_a_template_beside_a_gguf_file_replaces_the_one_in_it(tmp_path: Path) -> None:
    path = convert(make_checkpoint(tmp_path / "hf", num_hidden_layers=1), tmp_path / "m" / "m.gguf")
    (path.parent / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    engine = Engine.load(str(path), device="cpu")
    assert engine.tokenizer.decode(engine.prompt_ids(REQUEST)) == "Hi!"


def test_a_worker_warns_when_it_starts(redis_url: str, tmp_path: Path) -> None:
    path = make_file(tmp_path)
    words = (
        *("work", "-m", str(path), "--redis", redis_url, "--no-record", "--burst"),
        *("--log-format", "text"),
    )
    template = tmp_path / "chat.jinja"
    template.write_text(CHATML)
    for options, warned in (((), True), (("--chat-template", str(template)), False)):
        done = subprocess.run(
            [COMMAND, *words, *options], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert (f"WARNING worker.host.engine_host: bare {MISSING}" in done.stderr) is warned


@contextmanager
def running(site: Site, folder: Path, *options: str) -> Iterator[None]:
    """A worker of this command line, until the end of the block."""
    words = ("work", "-m", str(folder), "--redis", site.url, "--results", str(site.folder))
    worker = subprocess.Popen([COMMAND, *words, "--device", "cpu", *options])
    try:
        wait_until(lambda: read_workers(site.redis) or worker.poll() is not None)
        yield
        worker.terminate()
        assert worker.wait(PATIENCE) == 0
        wait_until(lambda: not read_workers(site.redis))
    finally:
        worker.kill()
        worker.wait(PATIENCE)


def test_the_template_of_a_request_is_rendered_by_workers_that_were_told_to(
    site: Site, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    template = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    request = REQUEST.model_copy(update={"chat_template": template})
    refusal = not_taken("m").message

    waiting = site.client.submit(request)
    with running(site, folder):
        with pytest.raises(JobError) as late:
            waiting.result(timeout=PATIENCE)
        with pytest.raises(JobError) as early:
            site.client.submit(request)
        assert [one.value.message for one in (late, early)] == [refusal, refusal]
        path = "/v1/chat/completions"
        reply = ask(lambda: AsyncClient(site.url), "POST", path, json=request.to_dict())
        assert reply.status_code == 400
        assert (reply.json()["error"]["message"], reply.json()["error"]["param"]) == (
            refusal,
            "chat_template",
        )

    with running(site, folder, "--trust-request-chat-template"):
        plain, job = site.client.submit(REQUEST), site.client.submit(request)
        site.client.gather(plain, job, timeout=PATIENCE)
        site.client.wait_for_rows([plain, job], timeout=PATIENCE)
    own, brought = site.row(plain), site.row(job)
    assert brought["prompt_token_ids"] == read_tokenizer(folder).encode("<Hi>")
    assert brought["chat_template_hash"] == template_hash({"default": template})
    assert own["prompt_token_ids"] != brought["prompt_token_ids"]
    assert own["chat_template_hash"] != brought["chat_template_hash"]
