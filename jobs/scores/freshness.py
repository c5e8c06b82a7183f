"""Tells scores of samples that a run no longer has: it went on, or rows of it were made again."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jobs.results.files import Results
from jobs.results.scores import SAMPLES_DIGEST, score_file
from jobs.scores.spec import parse_spec


def samples_digest(results: Results, run: str) -> str:
    """Numbers that change with the samples of a run, and not with the files that they are in: how
    many there are, how many have an answer, and the sum of the times at which their jobs ended."""
    rows = answered = ends = 0
    for batch in results.dataset(run).to_batches(columns=["status", "finished_at"]):
        rows += batch.num_rows
        answered += pc.sum(pc.equal(batch["status"], "ok")).as_py() or 0
        ends += pc.sum(pc.cast(batch["finished_at"], pa.int64())).as_py() or 0
    return f"{rows} {answered} {ends % 2**64}"


def is_stale(results: Results, run: str, metric: str, digest: str) -> bool:
    """True if the scores of a run by a metric are not of its samples now, whose digest this is.
    Scores of a version that kept no digest are, if there are more or fewer."""
    found = pq.read_metadata(score_file(results.path(run), metric))
    known = (found.metadata or {}).get(SAMPLES_DIGEST.encode())
    if known is not None:
        return bool(known.decode() != digest)
    per_sample = parse_spec(metric).samples is None
    return per_sample and found.num_rows != int(digest.split()[0])


def stale_sentence(run: str, metric: str) -> str:
    """A sentence for people, with the command that scores again."""
    return (
        f"run {run} has other rows than when {metric} was scored: chatjobs score {run} --metric "
        f"'{metric}'"
    )
