"""Scores of a judge for `chatjobs score`: asks the model through its queues, as `chatjobs run`
does, and writes the table of its verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jobs.cli.failures import Failure
from jobs.cli.field_options import fields_option
from jobs.cli.options import client, refuse_embedded
from jobs.cli.output import echo
from jobs.cli.run_watcher import check_folder
from jobs.cli.watched_run import WINDOW_ROWS, WatchedRun

if TYPE_CHECKING:
    from jobs import Results
    from jobs.scores.scoring import Tally
    from jobs.scores.spec import Spec
    from jobs.scores.targets import Targets

judge_fields_option = fields_option(
    {
        "model": "--metric judge:MODEL",
        "messages": "--metric judge:MODEL:FILE.jinja",
        "metadata": "chatjobs score",
        "job": "chatjobs score",
        "n": "chatjobs score: a judge gives one answer",
    },
    "Field of the requests to a judge, such as max_tokens=512; repeatable.",
)


def score_by_judge(
    store: Results,
    run: str,
    spec: Spec,
    fields: Mapping[str, Any],
    targets: Targets | None,
    redis_url: str,
    *,
    quiet: bool,
) -> Tally:
    """Ask the judge about each answer that it was not asked about, and write its scores. `fields`:
    of its requests. `targets`: instead of those of the run."""
    from jobs.data_sets.row_templates import RowTemplate
    from jobs.results.model_versions import mixture_sentence
    from jobs.runs.data_set_run import DataSetRun
    from jobs.runs.judge_run import Questions, judged_rows
    from jobs.scores.freshness import samples_digest
    from jobs.scores.judge import Judge
    from jobs.scores.scoring import check_samples, write_rows

    refuse_embedded(redis_url)
    check_samples(store, run, spec, targets)
    samples = samples_digest(store, run)
    digest = None if targets is None else targets.digest
    judge = Judge.of(spec.argument or "", fields, digest)
    questions = Questions(store, run, judge, RowTemplate(judge.template, {}).render, targets)
    questions.check()
    with client(redis_url, quiet=quiet) as connected:
        check_folder(connected, store)
        asked = DataSetRun(
            connected.redis,
            store,
            questions.name,
            questions,
            judge.configuration(run),
            window=WINDOW_ROWS,
            expected=len(questions),
        )
        watched = WatchedRun(
            asked, connected, store, [judge.model], len(questions), spec.text, quiet=quiet
        )
        found = watched.execute(questions.outdated)
    if not found.holds:
        raise Failure(f"the rows of run {questions.name} are not those of run {run}: {found}")
    if found.mixed and not quiet:
        echo(mixture_sentence(questions.name, found.versions), err=True)
    return write_rows(store, run, spec, judged_rows(store, questions.name, run), samples)
