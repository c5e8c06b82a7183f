"""`chatjobs run --dry-run`: what a run would do, from its data set and a pilot of a few rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from jobs.cli.failures import Failure
from jobs.cli.interrupts import interrupts_raise
from jobs.cli.options import client
from jobs.cli.output import echo, print_json
from jobs.cli.pilot import Pilot, run_pilot
from jobs.cli.run_watcher import check_all_score, check_folder
from jobs.cli.survey import Prompts, Survey, Tokens, survey
from jobs.data_sets.modes import SCORE_MODES
from jobs.errors import JobError
from jobs.sizes import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jobs import Client, Results
    from jobs.data_sets.data_set import DataSet

PILOT_ROWS = 20
MAX_SHOWN = 2000  # characters of the first prompt; JSON has all of it


class DryRun:
    """One call of the command. Nothing but the pilot is enqueued, and no run is written to."""

    def __init__(
        self,
        store: Results,
        name: str,
        source: DataSet,
        configuration: Mapping[str, Any],
        count: int,
        *,
        unused: str,
        retry_failed: bool,
        max_error_rate: float | None,
        price_per_hour: float | None,
        quiet: bool,
    ) -> None:
        """`count`: samples of the data set, about. `unused`: its columns that nothing uses. Raises
        InvalidRequest if the run was made with another configuration."""
        from jobs.runs.run_file import RunFile
        from jobs.runs.written_rows import WrittenRows

        RunFile(store, name).check(configuration)

        self._store, self._name, self._source, self._count = store, name, source, count
        self._unused = unused
        self._retry_failed, self._max_error_rate = retry_failed, max_error_rate
        self._price, self._quiet = price_per_hour, quiet
        self._scores = configuration["mode"] in SCORE_MODES
        self._written = WrittenRows(store, name, source.samples)
        self._models: dict[str, Prompts | str] = {}
        self._pilot: Pilot | None = None
        self._no_pilot = "it was not finished"  # why there is none

    def run(self, redis_url: str, *, as_json: bool) -> None:
        """Print what the run would do. Raises Failure if rows would fail, and InvalidRequest if
        workers serve other versions of the models than have made the answers so far."""
        from jobs.runs.same_versions import SameVersions

        self._written.refresh()
        with interrupts_raise():
            found = self._survey()
        try:
            if not found.sample:
                self._no_pilot = "no row is left to run"
            else:
                with client(redis_url, quiet=self._quiet) as connected:
                    check_folder(connected, self._store)
                    SameVersions(connected.redis, self._store, self._name).check()
                    self._run_pilot(connected, found)
        except (click.ClickException, JobError) as error:  # such as Redis that is not reached
            self._no_pilot = error.message
            raise
        finally:
            if as_json:
                print_json(self._facts(found))
            else:
                self._print(found)
        self._check(found)

    def _survey(self) -> Survey:
        from jobs.cli.progress import RowProgress

        with RowProgress(self._count // self._source.samples, quiet=self._quiet) as progress:
            return survey(
                self._source,
                self._prompts,
                self._is_done,
                PILOT_ROWS,
                lambda rows: progress.update(rows, 0),
            )

    def _is_done(self, number: int) -> bool:
        again = self._retry_failed and number in self._written.failed
        return number in self._written.rows and not again

    def _prompts(self, model: str) -> Prompts | str:
        if model not in self._models:
            self._models[model] = _open(model)
        return self._models[model]

    def _run_pilot(self, connected: Client, found: Survey) -> None:
        from jobs.client.serving import nobody_takes
        from jobs.operations import CHAT, SCORE
        from jobs.store.worker_status import read_statuses

        models = sorted({row.request.model for row in found.sample})
        if self._scores:
            check_all_score(connected, models)
        func = (SCORE if self._scores else CHAT).func
        workers = read_statuses(connected.redis)
        for model in models:
            if not workers.serve(model, func):
                self._no_pilot = nobody_takes(model, func, workers)
                return
        self._pilot = run_pilot(
            connected,
            self._store,
            self._name,
            found.sample,
            workers=min(workers.serve(model, func) for model in models),
            quiet=self._quiet,
        )

    def _tokens(self, found: Survey) -> Tokens:
        """Of the whole data set, or of the pilot."""
        if found.tokens.rows or self._pilot is None:
            return found.tokens
        tokens = Tokens()
        for count in self._pilot.input_tokens:
            tokens.add(count)
        return tokens

    def _seconds(self, found: Survey) -> float | None:
        """The time that the rest of the run takes at the speed of the pilot."""
        speed = None if self._pilot is None else self._pilot.rows_per_second
        return None if speed is None else found.left / speed

    def _facts(self, found: Survey) -> dict[str, Any]:
        tokens = self._tokens(found)
        seconds, hourly = self._seconds(found), self._price
        price = None if seconds is None or hourly is None else seconds / 3600 * hourly
        return {
            "run": self._name,
            "rows": found.rows,
            "samples": self._source.samples,
            "done": len(self._written.rows),
            "left": found.left,
            "errors": dict(found.errors),
            "first_errors": found.first_errors,
            "too_long": found.too_long,
            "tokens": tokens.to_dict() if tokens.rows else None,
            "models": {
                name: {"unknown": one} if isinstance(one, str) else dict(one.facts)
                for name, one in self._models.items()
            },
            "first_prompt": found.first_prompt,
            "pilot": None if self._pilot is None else self._pilot.to_dict(),
            "no_pilot": self._no_pilot if self._pilot is None else None,
            "seconds": seconds,
            "price": price,
        }

    def _print(self, found: Survey) -> None:
        from jobs.cli.progress import duration_text

        lines = [("run", self._name), ("rows", self._rows(found))]
        lines += [("", error) for error in found.first_errors]
        rest = found.errors.total() - len(found.first_errors)
        lines += [("", f"and {counted(rest, 'more row')}")] if rest else []
        lines += [("not used", self._unused)] if self._unused else []
        lines.append(("tokens", self._tokens_text(found)))
        for name, one in self._models.items():
            lines.append((f"model {name}", _model_text(one)))
        if (pilot := self._pilot) is None:
            lines.append(("pilot", f"none: {self._no_pilot}"))
        else:
            lines.append(("pilot", _pilot_text(pilot)))
            lines += [("", error) for error in pilot.errors[:1]]
        if (seconds := self._seconds(found)) is not None:
            text = f"about {duration_text(seconds)} for {counted(found.left, 'row')}"
            if self._price is not None:
                price = seconds / 3600 * self._price
                text += f", price {price:,.4g}, {1000 * price / found.left:,.4g} for 1,000 rows"
            lines.append(("estimate", text))
        width = max(len(name) for name, _ in lines)
        for name, text in lines:
            echo(f"{name:<{width}}  {text}")
        if found.first_prompt is not None:
            echo("first prompt:")
            echo(found.first_prompt[:MAX_SHOWN])

    def _rows(self, found: Survey) -> str:
        samples = self._source.samples
        times = f" with {samples:,} samples each" if samples > 1 else ""
        done = len(self._written.rows)
        text = f"{found.rows:,}{times}, {done:,} done, {found.left:,} to run"
        failing = found.errors.total()
        if failing:
            kinds = ", ".join(f"{code} {count:,}" for code, count in found.errors.most_common())
            text += f", {failing:,} will fail ({kinds})"
        return text

    def _tokens_text(self, found: Survey) -> str:
        tokens = self._tokens(found)
        if not tokens.rows:
            return "not known"
        of = "a row" if self._scores else "a prompt"
        text = f"min {tokens.least:,}, mean {tokens.mean:,.1f}, max {tokens.most:,} of {of}"
        if found.tokens.rows:
            return f"{text}, {tokens.total:,} in all; {counted(found.too_long, 'row')} too long"
        return f"{text}, of the rows of the pilot"

    def _check(self, found: Survey) -> None:
        failing = found.errors.total()
        if failing > (self._max_error_rate or 0) * found.rows:
            raise Failure(f"{failing:,} of {counted(found.rows, 'row')} will fail")
        if self._pilot is not None and self._pilot.failed:
            raise Failure(
                f"{self._pilot.failed} of {counted(self._pilot.rows, 'row')} of the pilot failed"
            )


def _open(model: str) -> Prompts | str:
    """The prompts of a model by the worker package, or why they are not known here."""
    from importlib.metadata import entry_points

    (plugin,) = entry_points(group="chatjobs.local", name="prompts")
    try:
        found: Prompts = plugin.load()(model)
        return found
    except JobError as error:
        return error.message
    except click.ClickException as error:  # torch is missing, or can't be imported
        return error.format_message()


def _model_text(one: Prompts | str) -> str:
    if isinstance(one, str):
        return f"not known on this machine: {one}"
    context = f"context of {one.context_length:,} tokens"
    return (
        f"{context}; this machine can't run it: {one.obstacle}"
        if one.obstacle
        else (f"{context}; it fits into the memory of this machine")
    )


def _pilot_text(pilot: Pilot) -> str:
    text = f"{counted(pilot.rows, 'row')} in {pilot.seconds:.1f} s"
    if (speed := pilot.rows_per_second) is not None:
        tokens = (pilot.output_tokens + pilot.scored_tokens) / pilot.seconds
        text += f": {speed:,.1f} rows/s, {tokens:,.0f} tokens/s"
    text += f", {pilot.failed} failed" if pilot.failed else ""
    return f"{text}; their answers are in run {pilot.run}"
