"""The metrics of a worker for Prometheus, read from their owners when they are scraped.

Names and labels are those of vLLM where it has the same figure, with `chatjobs_` for `vllm:`, since
Prometheus keeps colons for the names of rules. docs/metrics.md lists them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from jobs import keys
from worker.monitoring.redis_figures import RedisFigures
from worker.monitoring.sources import Sources
from worker.queue.job_figures import Histogram

# By figure of a job's row: the metric, and its documentation.
SECONDS = {
    "queue_s": ("chatjobs_request_queue_time_seconds", "From submit to the start of the prompt."),
    "ttft_s": ("chatjobs_time_to_first_token_seconds", "From the start of the prompt to a token."),
    "tpot_s": ("chatjobs_request_time_per_output_token_seconds", "Per token after the first one."),
    "duration_s": ("chatjobs_request_inference_time_seconds", "From the start to the last token."),
}


class WorkerCollector(Collector):
    """All metrics of a worker, but those of its process."""

    def __init__(self, sources: Sources, redis: RedisFigures) -> None:
        self._sources, self._redis = sources, redis

    def collect(self) -> Iterator[Metric]:
        yield from self._of_worker()
        yield from self._of_engine()
        yield from self._of_jobs()
        yield from self._of_loads()
        yield from self._of_redis()

    def _of_worker(self) -> Iterator[Metric]:
        sources = self._sources
        about = {"worker": sources.worker, "version": version("chatjobs")}
        yield _gauge("chatjobs_worker_info", "The worker.", [((*about.values(),), 1)], [*about])
        ready = not sources.readiness.obstacle
        yield _gauge("chatjobs_ready", "1 while the worker claims jobs, as /readyz.", int(ready))
        results = sources.recording()
        if results is not None:
            writes = int(not results["error"])
            yield _gauge("chatjobs_results_writable", "1 while rows can be written.", writes)
        models = {((one.name, one.dtype, one.device), 1) for one in sources.served.open_models}
        labels = ["model_name", "dtype", "device"]
        yield _gauge("chatjobs_model_info", "The models in memory.", models, labels)
        in_memory = sources.served.open_names
        names = [((name,), int(name in in_memory)) for name in sources.served]
        documentation = "The names of models that are served; 1 while jobs are claimed for them."
        yield _gauge("chatjobs_model_served", documentation, names, ["model_name"])

    def _of_engine(self) -> Iterator[Metric]:
        health, memory = self._sources.backend.health(), self._sources.backend.memory()
        gauge, counter = _gauge, _counter
        yield gauge("chatjobs_num_requests_running", "Sequences in the batch.", health.running)
        yield gauge("chatjobs_num_requests_waiting", "Sequences before it.", health.waiting)
        yield counter("chatjobs_generation_tokens", "Tokens generated.", health.tokens_generated)
        yield counter("chatjobs_prompt_tokens", "Tokens of prompts that ran.", health.prompt_tokens)
        queries, hits = health.prompt_tokens, health.cached_tokens
        yield counter("chatjobs_prefix_cache_queries", "Tokens looked up as a prefix.", queries)
        yield counter("chatjobs_prefix_cache_hits", "Tokens that were not computed again.", hits)
        drafts, drafted = health.draft_steps, health.drafted_tokens
        yield counter("chatjobs_spec_decode_num_drafts", "Drafts that were verified.", drafts)
        yield counter("chatjobs_spec_decode_num_draft_tokens", "Tokens of drafts.", drafted)
        accepted = health.accepted_tokens
        yield counter(
            "chatjobs_spec_decode_num_accepted_tokens", "Those that were right.", accepted
        )
        usage = memory.cache / memory.cache_limit if memory.cache_limit else 0.0
        yield gauge("chatjobs_kv_cache_usage_perc", "Share of the KV cache that is used.", usage)
        kinds = [
            ((memory.device, kind), getattr(memory, kind))
            for kind in ("weights", "cache", "cache_limit", "free", "budget")
            if getattr(memory, kind) is not None
        ]
        labels = ["device", "kind"]
        yield gauge("chatjobs_device_memory_bytes", "Memory of the device.", kinds, labels)
        caches = [
            ((model, kind), value)
            for model, one in memory.caches.items()
            for kind, value in asdict(one).items()
        ]
        labels = ["model_name", "kind"]
        yield gauge("chatjobs_kv_cache_bytes", "Memory of the KV caches.", caches, labels)
        if memory.host_limit is not None:
            kept = [((model,), nbytes) for model, nbytes in memory.kept.items()]
            documentation, labels = "Weights in host memory.", ["model_name"]
            yield gauge("chatjobs_host_memory_bytes", documentation, kept, labels)
            limit = memory.host_limit
            yield gauge("chatjobs_host_memory_limit_bytes", "Most bytes of these.", limit)

    def _of_jobs(self) -> Iterator[Metric]:
        jobs = self._sources.jobs
        yield _gauge("chatjobs_jobs_running", "Jobs of this worker.", self._sources.running())
        labels = ["model_name", "finished_reason"]
        finished = list(jobs.finished.items())
        yield _counter("chatjobs_request_success", "Jobs that have finished.", finished, labels)
        labels, errors = ["model_name", "code"], list(jobs.errors.items())
        yield _counter("chatjobs_job_errors", "Jobs that have failed.", errors, labels)
        retries = list(jobs.retries.items())
        yield _counter("chatjobs_job_retries", "Attempts that were repeated.", retries, labels)
        yield _counter("chatjobs_lost_leases", "Jobs lost to other workers.", jobs.lost_leases)
        for figure, (name, documentation) in SECONDS.items():
            yield _histogram(name, documentation, dict(jobs.seconds[figure]))

    def _of_loads(self) -> Iterator[Metric]:
        loads = self._sources.loads()
        yield _counter("chatjobs_model_loads", "Models loaded.", loads.loads)
        yield _counter("chatjobs_model_evictions", "Models unloaded.", loads.evictions)
        yield _counter("chatjobs_model_swaps", "Loads that unloaded a model.", loads.swaps)
        blocked = loads.blocked_seconds
        yield _gauge("chatjobs_load_path_blocked_seconds", "Age of the load in progress.", blocked)

    def _of_redis(self) -> Iterator[Metric]:
        found = self._redis.read()
        yield _gauge("chatjobs_redis_up", "1 if Redis replies.", int(found is not None))
        if found is None:
            return
        jobs: defaultdict[tuple[str, ...], float] = defaultdict(float)
        oldest: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for queue in found.queues:
            priority = "bulk" if keys.is_bulk(queue["name"]) else "interactive"
            where = (queue["model"], priority)
            for state in ("queued", "deferred", "scheduled", "running", "failed"):
                jobs[*where, state] += queue[state]
            oldest[where] = max(oldest[where], queue["oldest_s"])
        labels = ["model_name", "priority"]
        by_state = [*labels, "state"]
        yield _gauge("chatjobs_queue_jobs", "Jobs of all workers.", jobs.items(), by_state)
        waits = oldest.items()
        yield _gauge("chatjobs_queue_oldest_seconds", "Wait of the first job.", waits, labels)
        rows, age = found.unwritten.count, found.unwritten.oldest
        yield _gauge("chatjobs_outbox_rows", "Rows that wait for Parquet.", rows)
        yield _gauge("chatjobs_outbox_oldest_seconds", "Age of the oldest of them.", age)


Values = float | Iterable[tuple[tuple[str, ...], float]]  # one value, or labels with theirs


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    documentation: str,
    values: Values,
    labels: Iterable[str] = (),
) -> Metric:
    found = kind(name, documentation, labels=list(labels))
    for given, value in values if isinstance(values, Iterable) else [((), values)]:
        found.add_metric(list(given), value)
    return found


_gauge, _counter = partial(_family, GaugeMetricFamily), partial(_family, CounterMetricFamily)


def _histogram(name: str, documentation: str, by_model: Mapping[str, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, documentation, labels=["model_name"])
    for model, found in by_model.items():
        bounds = [*(f"{bound:g}" for bound in found.bounds), "+Inf"]
        counts = accumulate(list(found.counts))
        family.add_metric([model], list(zip(bounds, counts, strict=True)), found.sum)
    return family
