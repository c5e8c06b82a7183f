"""The spans of ended jobs: queued, prefill and decode, below one span for the job.

Names of attributes are those of OpenTelemetry's semantic conventions for generative AI; the text of
prompts and answers is in none. Times are those of the job's row.
"""

from __future__ import annotations

from typing import Any

from jobs.operations import operation_named
from jobs.results.values import as_object
from jobs.store.settlement import Settlement
from jobs.tracing import Tracing
from worker.backend import Outcome

# Fields of a request, by the attribute that has their value.
_REQUEST = {
    "gen_ai.request.model": "model",
    "gen_ai.request.choice.count": "n",
    "gen_ai.request.seed": "seed",
    "gen_ai.request.temperature": "temperature",
    "gen_ai.request.top_p": "top_p",
    "gen_ai.request.top_k": "top_k",
    "gen_ai.request.frequency_penalty": "frequency_penalty",
    "gen_ai.request.presence_penalty": "presence_penalty",
    "gen_ai.request.stream": "stream",
}


class JobSpans:
    """Makes the spans of jobs when they have ended."""

    def __init__(self, tracing: Tracing, worker: str) -> None:
        self._tracing, self._worker = tracing, worker

    def ended(self, model: str, settlement: Settlement, outcome: Outcome | None) -> None:
        """A job of this worker has ended. `outcome`: None if it was not started."""
        claimed = settlement.claimed
        request, error = claimed.request, settlement.error
        queued = claimed.enqueued_at - claimed.redis_ahead
        started = outcome.started_at if outcome is not None else None
        first = outcome.first_token_at if outcome is not None else None
        end = (outcome.finished_at if outcome is not None else None) or claimed.claimed_at
        operation = operation_named(claimed.func).name
        shared = {"chatjobs.job.id": settlement.lease.job}
        parent = self._tracing.span(
            f"{operation} {model}",
            queued,
            end,
            self._tracing.caller(request.get("metadata")),
            {
                **shared,
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "chatjobs",
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
                **_of_outcome(outcome),
                **(_of_request(request) if outcome is not None else {}),
                "gen_ai.response.time_to_first_chunk": None if first is None else first - queued,
                "chatjobs.run": settlement.run,
                "chatjobs.attempt": settlement.lease.attempt,
                "chatjobs.worker": self._worker,
            },
            consumer=True,
            error=None if error is None else (error.code, error.message),
        )
        self._tracing.span("queued", queued, started or end, parent, shared)
        if started is not None:
            self._tracing.span("prefill", started, first or end, parent, shared)
        if first is not None:
            self._tracing.span("decode", first, end, parent, shared)


def _of_request(request: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a request that was checked."""
    found = {attribute: request.get(field) for attribute, field in _REQUEST.items()}
    limits = [request.get(field) for field in ("max_completion_tokens", "max_tokens")]
    limit = next((one for one in limits if one is not None), None)
    return {
        **found,
        "gen_ai.request.max_tokens": limit,
        "gen_ai.conversation.id": as_object(request.get("job")).get("session"),
    }


def _of_outcome(outcome: Outcome | None) -> dict[str, Any]:
    answer = None if outcome is None else outcome.result or outcome.partial
    if answer is None:
        return {}
    found: dict[str, Any] = {"gen_ai.response.finish_reasons": [answer.finish_reason]}
    if (usage := answer.usage) is not None:
        read, reasoned = usage.prompt_tokens_details, usage.completion_tokens_details
        found |= {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": read and read.cached_tokens,
            "gen_ai.usage.reasoning.output_tokens": reasoned and reasoned.reasoning_tokens,
        }
    return found
