"""The demo model with its draft through a real Redis and a real worker: results, rows, `status`,
`chat --verbose`."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from tests.cli.conftest import COMMAND
from tests.worker.site import PATIENCE, Site, wait_until
from worker import Engine


def test_a_worker_with_a_draft_gives_the_same_answer_and_its_figures(site: Site) -> None:
    request: Any = {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is 345 + 278?"}],
        "temperature": 0,
    }
    words = ["--model", "demo", "--draft", "demo-draft", "--max-batch", "1", "--redis", site.url]
    worker = subprocess.Popen([COMMAND, "work", *words, "--results", str(site.folder)])
    try:

        def status(*words: str) -> str:
            words = (str(COMMAND), "status", *words, "--redis", site.url)
            return subprocess.run(words, capture_output=True, text=True, check=True).stdout

        def published() -> tuple[int, int, int] | None:
            """The accepted and drafted tokens and the steps that the worker has reported."""
            for one in json.loads(status("--json"))["workers"]:
                return one["accepted_tokens"], one["drafted_tokens"], one["draft_steps"]
            return None

        job = site.client.submit(request)
        found = job.result(timeout=PATIENCE)
        assert found.usage is not None and found.usage.completion_tokens_details is not None
        details = found.usage.completion_tokens_details
        accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
        steps = details.prediction_steps
        assert accepted is not None and rejected is not None and steps is not None
        assert accepted > rejected
        # A report may be of the middle of the answer; the next one is of its end.
        figures = (accepted, accepted + rejected, steps)
        wait_until(lambda: published() == figures)
        share = f"{100 * accepted / (accepted + rejected):.0f} %, {accepted / steps:.1f} a step"
        wait_until(lambda: share in " ".join(status().split()))
        chat = ["chat", "-m", "demo", "--verbose", "-o", "n=2", "-o", "seed=3"]
        words = [*chat, "-o", 'job={"run": "chat"}', "--redis", site.url, "What is 512 + 99?"]
        spoken = subprocess.run([COMMAND, *words], capture_output=True, text=True, check=True)
    finally:
        worker.terminate()
        assert worker.wait(PATIENCE) == 0
    assert found.text == Engine.load("demo", device="cpu").chat(request).text == "623"
    row = site.row(job)
    assert row["accepted_tokens"] == accepted
    assert row["drafted_tokens"] == accepted + rejected
    assert row["draft_steps"] == steps
    choices = site.rows("chat")
    assert len(choices) == 2
    drafted, accepted, steps = (
        sum(choice[name] for choice in choices)
        for name in ("drafted_tokens", "accepted_tokens", "draft_steps")
    )
    assert all(0 < choice["draft_steps"] < steps for choice in choices)
    told = f", {accepted / drafted:.0%} of the draft accepted, {accepted / steps:.1f} tokens a step"
    assert spoken.stderr.rstrip().endswith(told)


def test_draft_options_that_do_not_fit_are_refused(site: Site) -> None:
    for words, told in (
        (["--model", "demo", "--draft-tokens", "3"], "--draft-tokens needs --draft"),
        (["--model", "demo", "--model", "x", "--draft", "demo-draft"], "is for one model"),
        (["--model", "demo-draft", "--draft-model", "demo"], "use a draft that is smaller"),
    ):
        command = [str(COMMAND), "work", *words, "--redis", site.url]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        assert ended.returncode == 2
        assert told in ended.stderr and "Traceback" not in ended.stderr
