"""`QueueLM`: the model class of lm-evaluation-harness whose requests are jobs.

lm_eval finds it as the model `chatjobs`, through `chatjobs lm-eval` or the entry point
`lm_eval.models`. Its figures are those of lm_eval's `hf` model.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from tqdm import tqdm

from jobs.api.answer import ChatCompletion
from jobs.api.request import ChatRequest
from jobs.client.client import Client
from jobs.client.in_flight import MAX_JOBS, outcomes, score_many
from jobs.errors import JobError
from jobs.lm_eval.requests import Likelihoods, chat_context, generation_fields, grouped

MAX_GEN_TOKS = 256  # of lm_eval's models
SEED = 1234  # of lm_eval's command line


class QueueLM(LM):  # type: ignore[misc]
    """Model arguments (`-a model=demo,redis=redis://host`):

    model            a name that workers serve
    redis            URL of Redis; by default CHATJOBS_REDIS_URL, else the local server
    max_length       tokens that the model sees at once; by default, and at most, the worker's
    max_gen_toks     tokens of an answer, for tasks that do not say, by default 256
    add_bos_token    whether texts begin with the tokenizer's special tokens; by default yes
    prefix_token_id  stands for an empty context, and begins a text; by default BOS, else EOS
    think_end_token  text that ends the reasoning, which is not part of answers
    chat_template_args, enable_thinking  variables of the chat template
    seed             of the first request that draws; each further one has the next
    run              run_id of the rows in Parquet; by default lm-eval-<time>
    priority, tenant, retries  of the jobs; the priority is bulk by default
    max_jobs         jobs in flight, by default 64

    batch_size, max_batch_size and device, which lm_eval sets, are the worker's affair.
    """

    def __init__(
        self,
        model: str,
        redis: str | None = None,
        *,
        max_length: int | None = None,
        max_gen_toks: int = MAX_GEN_TOKS,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | None = None,
        chat_template_args: dict[str, Any] | None = None,
        enable_thinking: bool | None = None,
        seed: int = SEED,
        run: str | None = None,
        priority: str = "bulk",
        tenant: str | None = None,
        retries: int | None = None,
        max_jobs: int = MAX_JOBS,
        batch_size: object = None,
        max_batch_size: object = None,
        device: object = None,
    ) -> None:
        super().__init__()
        self._client = Client(redis)
        self._model, self._max_length, self._max_gen_toks = str(model), max_length, max_gen_toks
        self._add_bos, self._prefix = add_bos_token is not False, prefix_token_id
        self._think_end = think_end_token
        self._seed, self._max_jobs = seed, max_jobs
        self._template = dict(chat_template_args or {})
        if enable_thinking is not None:
            self._template["enable_thinking"] = enable_thinking
        now = time.strftime("%Y%m%d-%H%M%S")
        self.run = f"lm-eval-{now}-{secrets.token_hex(2)}" if run is None else str(run)
        job = {"run": self.run, "priority": priority, "tenant": tenant, "retries": retries}
        self._job: dict[str, Any] = {k: value for k, value in job.items() if value is not None}
        self._rows = 0  # of the run, up to now

    @property
    def tokenizer_name(self) -> str:
        """The name in the keys of lm_eval's cache of requests, which have no rendered text."""
        return f"chatjobs__{self._model}".replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A text that stands for the conversation: the worker renders it."""
        return chat_context(chat_history, complete=add_generation_prompt)

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Raises JobError for the first request that fails."""
        groups = grouped(one.args for one in requests)
        answers: list[Any] = [None] * len(requests)
        with tqdm(total=len(requests), desc="loglikelihood", disable=disable_tqdm) as bar:
            for group, scored in self._scored(groups, [one.item() for one in groups], requests):
                for numbers, score in zip(
                    group.numbers.values(), scored.continuations, strict=True
                ):
                    for number in numbers:
                        answers[number] = (score.logprob_sum, score.is_greedy)
                        args = requests[number].args
                        self.cache_hook.add_partial("loglikelihood", args, answers[number])
                    bar.update(len(numbers))
        return answers

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Raises JobError for the first request that fails."""
        groups = [one for one in grouped((one.args[0], "") for one in requests) if one.context]
        items = [{"type": "perplexity", "text": one.context} for one in groups]
        answers = [0.0] * len(requests)  # of a text without tokens
        with tqdm(total=len(requests), desc="loglikelihood_rolling", disable=disable_tqdm) as bar:
            for group, scored in self._scored(groups, items, requests):
                (numbers,) = group.numbers.values()
                for number in numbers:
                    answers[number] = scored.text.logprob_sum
                    args = requests[number].args
                    self.cache_hook.add_partial("loglikelihood_rolling", args, answers[number])
                bar.update(len(numbers))
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Raises JobError for the first request that fails."""
        answers = [""] * len(requests)
        stops: list[list[str]] = []
        row = self._take_rows(len(requests))

        def chats() -> Iterator[ChatRequest]:
            for number, one in enumerate(requests):
                context, given = one.args
                arguments = normalize_gen_kwargs(given, self._max_gen_toks)
                stops.append(handle_stop_sequences(arguments["until"], eos=None))
                try:
                    fields = generation_fields(
                        context, arguments, max_length=self._max_length, seed=self._seed + number
                    )
                except JobError as error:
                    raise self._failure(error, row + number, one) from None
                if self._template and "apply_chat_template" not in fields:
                    fields["chat_template_kwargs"] = self._template
                fields["job"] = {**self._job, "row": row + number}
                yield ChatRequest(
                    model=self._model,
                    add_special_tokens=self._add_bos,
                    metadata=_source(one),
                    **fields,
                )

        with (
            tqdm(total=len(requests), desc="generate_until", disable=disable_tqdm) as bar,
            closing(outcomes(self._client, chats(), self._max_jobs)) as found,
        ):
            for number, outcome in found:
                if isinstance(outcome, JobError):
                    raise self._failure(outcome, row + number, requests[number])
                assert isinstance(outcome, ChatCompletion)
                answers[number] = postprocess_generated_text(
                    outcome.choices[0].message.content or "", stops[number], self._think_end
                )
                args = requests[number].args
                self.cache_hook.add_partial("generate_until", args, answers[number])
                bar.update()
        return answers

    def _scored(
        self, groups: list[Likelihoods], items: list[dict[str, Any]], requests: list[Instance]
    ) -> Iterator[tuple[Likelihoods, Any]]:
        """Each group with the result of its item. Raises JobError for the first that failed."""
        row = self._take_rows(len(groups))
        firsts = [requests[min(map(min, one.numbers.values()))] for one in groups]
        given = (
            {**item, "metadata": _source(one)} for item, one in zip(items, firsts, strict=True)
        )
        fields: dict[str, Any] = {
            "truncate": "left",
            "token_logprobs": False,
            "messages_as_text": True,
            "add_special_tokens": self._add_bos,
            "prefix_token_id": self._prefix,
            "max_length": self._max_length,
            "chat_template_kwargs": self._template or None,
            "job": {**self._job, "row": row},
            "max_jobs": self._max_jobs,
        }
        with closing(score_many(self._client, self._model, given, **fields)) as found:
            for number, scored in found:
                if scored.failure is not None:
                    raise self._failure(scored.failure, row + number, firsts[number])
                yield groups[number], scored

    def _take_rows(self, count: int) -> int:
        """The first of so many row_indexes that no other request has."""
        first, self._rows = self._rows, self._rows + count
        return first

    def _failure(self, error: JobError, row: int, one: Instance) -> JobError:
        place = f"row {row} of run {self.run!r} (task {one.task_name}, document {one.doc_id})"
        return JobError(error.code, f"{place}: {error.message}", error.param)


def _source(one: Instance) -> dict[str, str]:
    """The task and the document that a request comes from, for its row."""
    return {"task": str(one.task_name), "document": str(one.doc_id)}
