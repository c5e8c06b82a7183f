"""Model names, and so queues, with spaces, other scripts and special characters are served; a name
that no model can have is refused when the request is made."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from rq import Queue
from rq.serializers import JSONSerializer

from jobs import ChatRequest, JobError
from jobs.cli import build
from tests.worker.fake_backend import text_of
from tests.worker.site import PATIENCE, Site, wait_until

NAMES = [
    "my model",
    "Modèle français (v2)",
    "模型/通义-千问",
    "🦙 llama",
    "a,b;c:d",
    "glob*[x]?{y}",
    "100% \"quoted\" 'twice' \\ back",
    "/data/my models/Q4 K M",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_any_name_is_served(site: Site, name: str) -> None:
    chat = site.submit(model=name, words=5)
    bulk = site.submit(model=name, words=5, priority="bulk")
    stopped = site.submit(model=name)
    assert stopped.cancel()
    site.burst(models=[name])
    for job in (chat, bulk):
        assert job.result(timeout=PATIENCE).text == text_of(job.request)
        assert site.row(job)["model"] == name
    assert "".join(chunk.text for chunk in chat.stream()) == text_of(chat.request)
    site.assert_settled([chat, bulk, stopped])


def test_the_jobs_of_a_killed_worker_return_to_queues_of_any_name(site: Site) -> None:
    jobs = [site.submit(model=name, words=100_000) for name in NAMES]
    worker = site.worker(models=NAMES)
    wait_until(lambda: all(job.status() == "started" for job in jobs))
    worker.kill()
    for job in jobs:
        job.cancel()
    site.burst(models=NAMES)
    for job in jobs:
        with pytest.raises(JobError, match="cancelled"):
            job.result(timeout=PATIENCE)
    site.assert_settled(jobs)


def test_tools_show_queues_of_any_name(site: Site) -> None:
    for name in NAMES:
        site.submit(model=name)
    shown = {queue.name for queue in Queue.all(site.redis, serializer=JSONSerializer)}
    assert shown >= {f"chat:{name}" for name in NAMES}
    done = CliRunner().invoke(build(), ["status", "--json", "--redis", site.url])
    assert done.exit_code == 0, done.output
    text = "".join(
        json.dumps(json.loads(line), ensure_ascii=False) for line in done.output.splitlines()
    )
    for name in NAMES:
        assert json.dumps(name, ensure_ascii=False)[1:-1] in text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("demo ", "model: 'demo ' begins or ends with a space: remove it"),
        ("\tdemo", r"model: '\tdemo' begins or ends with a space"),
        ("de\nmo", r"model: 'de\nmo' contains a control character"),
        ("de\0mo", r"model: 'de\x00mo' contains a control character"),
        (" ", "model: ' ' begins or ends with a space"),
        ("x" * 1001, "model: a name has at most 1000 characters, got 1001"),
    ],
)
def test_a_name_that_no_model_can_have_is_refused(name: str, words: str) -> None:
    with pytest.raises(JobError) as caught:
        ChatRequest(model=name, messages=[{"role": "user", "content": "hi"}])
    assert caught.value.param == "model"
    assert caught.value.message.startswith(words)
