"""Outbox entries that the tests of results share."""

from __future__ import annotations

from jobs.errors import JobError
from jobs.results.outbox import OutboxEntry, outbox_entry

REQUEST = {
    "model": "demo",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "3"}],
        },
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
    ],
    "stop": "\n",
    "max_completion_tokens": 7,
    "logit_bias": {"5": 1.5},
    "metadata": {"source": "test"},
    "job": {
        "run": "r1",
        "row": 4,
        "custom_id": "mine",
        "target": "5",
        "session": "s1",
        "tenant": "acme",
        "tags": ["a", "b"],
    },
}
PROVENANCE = {"revision": "abc", "fingerprint": "f00", "dtype": "bfloat16", "engine": "chatjobs"}


def token(text: str, logprob: float, top: list[tuple[str, float]] = ()) -> dict:  # type: ignore[assignment]
    tops = [{"token": t, "logprob": p, "bytes": None} for t, p in top]
    return {"token": text, "logprob": logprob, "bytes": None, "top_logprobs": tops}


def ok_entry(
    row: int = 4, job_id: str = "j1", choices: int = 1, logprobs: bool = False
) -> OutboxEntry:
    answers = []
    for index in range(choices):
        content = [token("5", -0.25, [("5", -0.25), ("6", -1.5)]), token(".", -0.5)]
        answers.append(
            {
                "index": index,
                "message": {"role": "assistant", "content": f"5.{index}"},
                "finish_reason": "stop",
                "logprobs": {"content": content} if logprobs else None,
            }
        )
    usage = {"prompt_tokens": 9, "completion_tokens": 2 * choices, "total_tokens": 9 + 2 * choices}
    request = {**REQUEST, "job": {**REQUEST["job"], "row": row}}  # type: ignore[dict-item]
    return outbox_entry(
        job_id,
        request,
        "ok",
        operation="chat",
        attempt=1,
        completion={"choices": answers, "usage": usage},
        prompt_token_ids=[1, 2, 3],
        output_token_ids=[[5, 6]] * choices,
        token_logprobs=[[-0.25, -0.5]] * choices if logprobs else (),
        sampling={"temperature": 0.0, "top_p": 1.0, "max_tokens": 7},
        seed=17,
        enqueued_at=100.0,
        started_at=101.0,
        first_token_at=101.5,
        finished_at=103.5,
        worker="w1",
        host="h1",
        provenance=PROVENANCE,
    )


def error_entry(row: int = 5, job_id: str = "j2") -> OutboxEntry:
    error = JobError("out_of_memory", "needs 9 GiB, 4 GiB are free").to_dict()
    request = {"model": "demo", "messages": [], "job": {"run": "r1", "row": row}}
    return outbox_entry(
        job_id, request, "error", operation="chat", attempt=3, error=error, finished_at=5.0
    )
