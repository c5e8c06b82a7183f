"""Tool calls through a real Redis and a real worker process."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from jobs.api.chunk import ChatChunk
from tests.cli.conftest import COMMAND
from tests.worker.checkpoints import make_checkpoint
from tests.worker.site import PATIENCE, Site, wait_until
from tests.worker.sources import read_tokenizer
from tests.worker.templates import CHATML, QWEN_TEMPLATE
from tests.worker.tokenizers import save_tokenizer

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {}}}
ANSWER = """\
<think>
Two sums.
</think>

I add.
<tool_call>
{"name": "add", "arguments": {"a": 1, "b": [2]}}
</tool_call>
<tool_call>
{"name": "add", "arguments": {"a": "drei"}}
</tool_call>"""
CALLS = [("add", {"a": 1, "b": [2]}), ("add", {"a": "drei"})]


def calls_in(chunks: list[ChatChunk]) -> list[tuple[str, Any]]:
    calls = [c for chunk in chunks for one in chunk.choices for c in one.delta.tool_calls or ()]
    assert [call.index for call in calls] == list(range(len(calls)))
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


def test_tool_calls_reach_streams_results_and_rows(site: Site, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    script = [read_tokenizer(folder).encode(ANSWER)]
    worker = site.worker(real=True, models=[str(folder)], script=script)
    job = site.submit("1 + 2?", model="m", tools=[TOOL], max_tokens=400)
    chunks = list(job.stream())
    completion = job.result(timeout=PATIENCE)
    message = completion.choices[0].message
    assert calls_in(chunks) == CALLS
    assert "".join(chunk.text for chunk in chunks) == message.content == "I add."
    assert message.reasoning_content == "Two sums."
    assert [c.id for c in message.tool_calls or ()] == [
        c.id for chunk in chunks for one in chunk.choices for c in one.delta.tool_calls or ()
    ]
    assert completion.choices[0].finish_reason == "tool_calls"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    for number, chunk in enumerate(chunks):  # a subscriber that resumes sees the rest once
        rest = list(site.client.job(job.id).stream(chunk.cursor))
        assert calls_in([*chunks[: number + 1], *rest]) == CALLS
    history = [{"role": "user", "content": "1 + 2?"}, message.model_dump()]
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "3"}
        for call in message.tool_calls or ()
    ]
    second = site.client.submit(
        {"model": "m", "messages": [*history, *results], "tools": [TOOL], "max_tokens": 400}
    )
    assert second.result(timeout=PATIENCE).choices[0].message.tool_calls
    assert worker.stop() == 0
    row = site.row(job)
    assert (row["text"], row["finish_reason"]) == ("I add.", "tool_calls")
    found = [
        (c["function"]["name"], json.loads(c["function"]["arguments"])) for c in row["tool_calls"]
    ]
    assert found == CALLS
    assert json.loads(row["tools"]) == [TOOL]
    assert [m["role"] for m in site.row(second)["messages"]] == [
        "user",
        "assistant",
        "tool",
        "tool",
    ]


def test_a_template_from_a_file_makes_a_worker_take_tools(site: Site, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    save_tokenizer(folder, "qwen", CHATML)
    (tmp_path / "tools.jinja").write_text(QWEN_TEMPLATE)
    words = ["work", "--model", str(folder), "--redis", site.url, "--results", str(site.folder)]
    refused = site.submit("1 + 2?", model="m", tools=[TOOL], max_tokens=2)
    taken: list[Any] = []
    for options, jobs in (
        ([], [refused]),
        (["--chat-template", str(tmp_path / "tools.jinja")], taken),
        (["--tool-parser", "hermes"], taken),
    ):
        if jobs is taken:
            taken.append(site.submit("1 + 2?", model="m", tools=[TOOL], max_tokens=2))
        done = subprocess.run(
            [COMMAND, *words, *options, "--burst"], capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stderr
    wait_until(lambda: all(job.status().over for job in (refused, *taken)))
    assert site.hash(refused)["status"] == "failed"
    lengths = [len(site.row(job)["prompt_token_ids"]) for job in taken]
    assert lengths[0] > 100 > lengths[1]  # without a template, the definitions stay out
