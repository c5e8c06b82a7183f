"""Programs that use or check servers of OpenAI's API, with the gateway."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.embedded import EmbeddedRedis
from jobs.gateway.openapi.document import document
from tests.extras.evaluations import compare, evaluate, tasks, write_documents
from tests.extras.test_lm_eval import COMMAND
from tests.jobs.gateway.conftest import GatewayProcess
from tests.waiting import wait_until
from tests.worker.site import ROOT

# The packages of these programs warn while they are imported.
pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("ignore")]

MODEL = ROOT / "worker/demo/model"
SUM: Any = {
    "messages": [{"role": "user", "content": "What is 17 + 25?"}],
    "temperature": 0,
    "max_tokens": 100,
}

# What schemathesis can't know of the fields of requests: the model that is served, what makes a
# job wait for a time or for another job, or expire before it ends, and what makes it long.
KNOWN: dict[str, dict[str, list[Any]]] = {
    "ChatRequest": {"model": ["demo"], "n": [None, 1, 2], "max_tokens": [1, 5]},
    "CompletionRequest": {"model": ["demo"], "n": [None, 1, 2], "max_tokens": [1, 5]},
    "ResponseRequest": {"model": ["demo"], "max_output_tokens": [1, 5]},
    "JobOptions": {
        **{name: [None] for name in ("delay", "at", "session", "turn")},
        **{"ttl": [None, 600], "priority": ["interactive"]},
    },
}


class Served:
    """A gateway, the Redis of its worker, and a folder for data."""

    def __init__(self, gateway: GatewayProcess, redis: str, folder: Path) -> None:
        self.url, self.redis, self.folder = f"{gateway.url}/v1", redis, folder


@pytest.fixture(scope="module")
def served(
    redis_server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("gateway")
    write_documents(folder)
    results = str(folder / "results")
    words = ["work", "--model", "demo", "--dtype", "fp32", "--tool-parser", "hermes"]
    words += ["--redis", redis_server.url, "--results", results]
    worker = subprocess.Popen([COMMAND, *words])
    gateway = GatewayProcess(redis_server.url, "--results", results)
    try:
        with gateway.http() as http:
            wait_until(lambda: http.get("/v1/models").json()["data"])
        yield Served(gateway, redis_server.url, folder)
    finally:
        gateway.kill()
        worker.terminate()
        worker.wait()


@pytest.mark.parametrize(
    ("limit", "its"),
    [
        pytest.param(None, 1024, id="whole"),
        # It counts the token that it has generated, and the last one that is scored.
        pytest.param(40, 42, id="long"),
    ],
)
def test_local_completions_have_the_figures_of_our_model(
    served: Served, limit: int | None, its: int
) -> None:
    given: Any = {"model": "demo", "base_url": f"{served.url}/completions"}
    given |= {"tokenizer": str(MODEL), "max_length": its}
    options: Any = {}
    own: Any = {"model": "demo", "redis": served.redis}
    if limit is not None:
        own["max_length"] = limit
        # Its contexts of texts to generate are cut elsewhere.
        options["tasks"] = [
            one for one in tasks(served.folder) if one["output_type"] != "generate_until"
        ]
    theirs = evaluate(served.folder, "local-completions", given, **options)
    compare(evaluate(served.folder, "chatjobs", own, **options), theirs)


def test_local_chat_completions_have_the_figures_of_our_model(served: Served) -> None:
    """Reasoning stays in the content, as in that of our model."""
    given: Any = {"model": "demo", "base_url": f"{served.url}/chat/completions"}
    own: Any = {"model": "demo", "redis": served.redis}
    kept: Any = {"separate_reasoning": False}
    theirs = evaluate(
        served.folder, "local-chat-completions", given, gen_kwargs=kept, **chats(served.folder)
    )
    compare(evaluate(served.folder, "chatjobs", own, **chats(served.folder)), theirs)


def chats(folder: Path) -> dict[str, Any]:
    """Options of an evaluation that asks for texts by conversations. lm_eval changes the tasks that
    it is given, so each evaluation has its own."""
    return {
        "tasks": [one for one in tasks(folder) if one["output_type"] == "generate_until"],
        "apply_chat_template": True,
        "fewshot_as_multiturn": True,
    }


@pytest.mark.parametrize(
    ("format", "passed", "failed", "skipped"),
    [
        (
            "openai-chat",
            {
                *("chat-basic-response", "chat-system-prompt", "chat-multi-turn"),
                *("chat-streaming-response", "chat-streaming-usage", "chat-error-handling"),
            },
            {"chat-image-input", "chat-tool-calling"},
            {"chat-reasoning-summary"},
        ),
        (
            "open-responses",
            {
                *("basic-response", "system-prompt", "multi-turn", "streaming-response"),
                *("streaming-usage", "assistant-phase", "response-output-phase-schema"),
                "error-handling",
            },
            {"image-input", "tool-calling", "compact-response", "compact-missing-model"},
            {"reasoning-summary"},
        ),
    ],
)
def test_llm_comply_finds_what_the_page_says(
    served: Served, format: str, passed: set[str], failed: set[str], skipped: set[str]
) -> None:
    """Images are refused. The demo model never ends the string of a call, which is then none.
    /v1/responses/compact is the path of a response here, so POST is refused with 405, not 404. The
    checks of reasoning are for models of OpenAI's names."""
    words = [str(Path(sys.executable).with_name("llm-comply")), "--format", format, "--json"]
    words += ["--base-url", served.url, "--api-key", "none", "--model", "demo"]
    done = subprocess.run([*words, "--timeout", "600"], capture_output=True, text=True)
    found: dict[str, set[str]] = {"passed": set(), "failed": set(), "skipped": set()}
    for one in json.loads(done.stdout)["results"]:
        found[one["status"]].add(one["id"])
    assert found == {"passed": passed, "failed": failed, "skipped": skipped}, done.stdout


def test_schemathesis_finds_the_replies_that_the_document_describes(
    served: Served, tmp_path: Path
) -> None:
    """positive_data_acceptance is left out: a document can't say all that a request is refused for,
    such as a grammar that is not one, or a model that is not served."""
    described = json.loads(json.dumps(document()))
    for name, fields in KNOWN.items():
        schema = described["components"]["schemas"][name]
        schema["properties"] |= {field: {"enum": values} for field, values in fields.items()}
        if name != "JobOptions":
            schema["required"] = sorted({*schema["required"], *(fields.keys() - {"n"})})
    for operations in described["paths"].values():
        for one in operations.values():
            # An event of another attempt is an error of the worker: 503.
            given = one.get("parameters", [])
            one["parameters"] = [each for each in given if each["name"] != "Last-Event-ID"]
    (tmp_path / "openapi.json").write_text(json.dumps(described))
    checks = ["not_a_server_error", "status_code_conformance", "content_type_conformance"]
    checks += ["response_schema_conformance"]
    words: list[Any] = [Path(sys.executable).with_name("schemathesis"), "run", "openapi.json"]
    words += ["--url", served.url.removesuffix("/v1"), "--checks", ",".join(checks)]
    words += ["--phases", "fuzzing", "--max-examples", "8", "--seed", "1", "--workers", "1"]
    words += ["--generation-database", "none", "--continue-on-failure", "--no-color"]
    words += ["--request-timeout", "600"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_litellm_reads_answers_streams_calls_and_errors(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network
    import litellm

    call: Any = {"model": "openai/demo", "api_base": served.url, "api_key": "none", **SUM}
    whole = litellm.completion(**call)
    assert whole.choices[0].message.content == "42"
    assert whole.choices[0].message.reasoning_content
    chunks = list(litellm.completion(**call, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "42"

    schema: Any = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    tool = {"type": "function", "function": {"name": "pick", "parameters": schema}}
    given = {**call, "max_tokens": 400, "tools": [tool], "tool_choice": "required"}
    given["parallel_tool_calls"] = False
    forced = litellm.completion(**given)
    assert forced.choices[0].finish_reason == "tool_calls", forced
    (made,) = forced.choices[0].message.tool_calls
    assert made.function.name == "pick" and json.loads(made.function.arguments)["a"] in (1, 2)

    with pytest.raises(litellm.NotFoundError, match="models served now: demo"):
        litellm.completion(**{**call, "model": "openai/other"})
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        litellm.completion(**call, top_p=2)
