"""A real run: GSM8K and BIG-Bench-Hard through a model, killed twice on the way, scored, compared,
reported and exported.

    python -m bench.real_run --model SmolLM2-135M-Instruct.Q4_1.gguf \\
        --gsm8k gsm8k_test.jsonl --bbh BIG-Bench-Hard/bbh --folder real-run

GSM8K is `grade_school_math/data/test.jsonl` of openai/grade-school-math (1,319 rows). `--bbh` is
the folder `bbh` of suzgunmirac/BIG-Bench-Hard, of which ten tasks are run (2,324 rows), or a JSONL
file of them with the columns task, input and target. The commands are those that a person types.
They are printed with their output, and at the end a table of time, speed and CPU time in Markdown;
FOLDER/real-run.md has all of it. The worker is killed (SIGKILL) after a third of the rows of GSM8K,
and `chatjobs run` after two thirds. `--limit 20` is a trial.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click

from bench.harness import environment
from jobs import Client, Results
from jobs.embedded import EmbeddedRedis
from jobs.store.worker_status import read_workers

COMMAND = Path(sys.executable).with_name("chatjobs")
QUESTION = "{{ question }}\nThink step by step. The last line is: #### and the number.\n"
TASK = "{{ input }}\nAnswer:\n"
OPTIONS = '{% for line in input.splitlines() if line[:1] == "(" %}{{ line[:3] }}\n{% endfor %}'
TASKS = (
    *("boolean_expressions", "date_understanding", "hyperbaton", "logical_deduction_three_objects"),
    *("movie_recommendation", "penguins_in_a_table", "snarks", "web_of_lies", "word_sorting"),
    "object_counting",
)
SHOTS = 3
LOOK_SECONDS = 3.0  # between two looks at the rows that are done
LOADING_SECONDS = 300.0
WORKER_KILLED, PRODUCER_KILLED = 1 / 3, 2 / 3  # of the rows
TICKS = os.sysconf("SC_CLK_TCK")

Row = dict[str, Any]


class Spent(NamedTuple):
    """Seconds of time, of CPU time of the commands, and of that of the workers."""

    seconds: float
    cpu: float
    worker_cpu: float


@dataclass(frozen=True, slots=True)
class Step:
    """One command, with the run whose rows it has made."""

    name: str
    took: Spent
    run: str | None


class Worker:
    """A worker process that is started again after a kill."""

    def __init__(self, model: str, url: str, folder: Path) -> None:
        self._model, self._url, self._folder = model, url, folder
        self._ended = 0.0  # CPU seconds of the processes that were killed
        self.start()

    def start(self) -> None:
        words = [str(COMMAND), "work", "-m", self._model, "--redis", self._url]
        with (self._folder / "worker.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*words, "--results", str(self._folder / "results")], stdout=log, stderr=log
            )

    def kill(self) -> None:
        self._ended = self.cpu
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    @property
    def cpu(self) -> float:
        """CPU seconds until now."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return self._ended + (int(stat[11]) + int(stat[12])) / TICKS


class RealRun:
    """The commands, one behind the other, and what they took."""

    def __init__(self, folder: Path, url: str, client: Client, worker: Worker, model: str) -> None:
        self._folder, self._url, self._client = folder, url, client
        self._worker, self._model = worker, model
        self._results = Results(folder / "results")
        self._cpu = 0.0  # CPU seconds of the commands that have ended
        self.steps: list[Step] = []
        self.lines: list[str] = []  # commands with their output

    def run(self, name: str, rows: int, data: str, *options: str, kills: bool = False) -> None:
        """`chatjobs run` of a file of so many rows, until it is done. With `kills`, the worker is
        killed, and later the command, which is then given again."""
        given = ["run", data, "-m", self._model, "--run", name, *options]
        begin = self._spent()
        process = self._start(given)
        if kills:
            self._wait_until(name, WORKER_KILLED * rows, process)
            self._worker.kill()
            self._say(f"[the worker is killed after {self._done(name)} of {rows} rows]")
            self._worker.start()
            self._wait_until(name, PRODUCER_KILLED * rows, process)
            process.kill()
            self._output(process)
            self._say(f"[chatjobs run is killed after {self._done(name)} of {rows} rows]")
            process = self._start(given)
        self._finish(process, f"run {name}", begin, name)

    def command(self, *words: str) -> None:
        """A command that needs no worker."""
        begin = self._spent()
        self._finish(self._start(list(words)), " ".join(words[:2]), begin)

    def table(self) -> str:
        """The steps as Markdown."""
        names = ("step", "rows", "minutes", "rows/s", "output tokens/s", "prompt tokens from cache")
        heads = (*names, "CPU s of the command", "CPU s of the worker")
        lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
        for step in self.steps:
            cells = [step.name, "", f"{step.took.seconds / 60:.1f}", "", "", ""]
            if step.run is not None:
                table = self._results.table(
                    run=step.run, columns=["output_tokens", "input_tokens", "cached_tokens"]
                ).to_pydict()
                rows = len(table["output_tokens"])
                output, given, cached = (
                    sum(one or 0 for one in table[name])
                    for name in ("output_tokens", "input_tokens", "cached_tokens")
                )
                cells[1], cells[3] = f"{rows:,}", f"{rows / step.took.seconds:.2f}"
                cells[4] = f"{output / step.took.seconds:.0f}" if output else ""
                cells[5] = f"{100 * cached / given:.0f} %" if given else ""
            cells += [f"{step.took.cpu:.1f}", f"{step.took.worker_cpu:.1f}"]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def _start(self, words: list[str]) -> subprocess.Popen[str]:
        self._say(f"$ chatjobs {shlex.join(words)}")
        variables = {**os.environ, "CHATJOBS_REDIS_URL": self._url}
        return subprocess.Popen(
            [COMMAND, *words],
            cwd=self._folder,
            env=variables,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _finish(
        self, process: subprocess.Popen[str], name: str, begin: Spent, run: str | None = None
    ) -> None:
        """Wait for a command that has to end well, and keep what it took since `begin`."""
        self._say(self._output(process))
        spent = self._spent()
        took = Spent(*(after - before for after, before in zip(spent, begin, strict=True)))
        self.steps.append(Step(name, took, run))
        if process.returncode:
            raise click.ClickException(f"chatjobs {name} has ended with {process.returncode}")

    def _output(self, process: subprocess.Popen[str]) -> str:
        """The output of a command that ends; its CPU time is counted."""
        assert process.stdout is not None
        output = process.stdout.read()
        process.stdout.close()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        self._cpu += usage.ru_utime + usage.ru_stime
        return output.rstrip()

    def _spent(self) -> Spent:
        return Spent(time.monotonic(), self._cpu, self._worker.cpu)

    def _wait_until(self, run: str, rows: float, process: subprocess.Popen[str]) -> None:
        while self._done(run) < rows:
            if process.poll() is not None:
                raise click.ClickException(f"run {run} has ended before {rows:.0f} rows")
            time.sleep(LOOK_SECONDS)

    def _done(self, run: str) -> int:
        status = self._client.run(run, results=self._folder / "results").status()
        return status.rows + status.unwritten

    def _say(self, text: str) -> None:
        print(text, flush=True)
        self.lines.append(text)


def prepare(folder: Path, gsm8k: Path, bbh: Path, limit: int | None) -> dict[str, int]:
    """Write the data sets and the templates. Returns the rows of the data sets. `limit`: rows of
    each, at least as many of each task as it has examples."""
    folder.mkdir(parents=True, exist_ok=True)
    questions, tasks = list(_rows(gsm8k)), list(_bbh_rows(bbh))
    if limit is not None:
        questions = questions[: max(limit, SHOTS + 1)]
        each = max(limit // len(TASKS), SHOTS + 1)
        tasks = [one for name in TASKS for one in [t for t in tasks if t["task"] == name][:each]]
    options = [one for one in tasks if "Options:" in one["input"]]
    files = {"gsm8k_test.jsonl": questions, "bbh.jsonl": tasks, "bbh-options.jsonl": options}
    for name, rows in files.items():
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / name).write_text(text, encoding="utf-8")
    for name, text in (("question", QUESTION), ("task", TASK), ("options", OPTIONS)):
        (folder / f"{name}.jinja").write_text(text, encoding="utf-8")
    return {name: len(rows) for name, rows in files.items()}


def _rows(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _bbh_rows(place: Path) -> Iterator[Row]:
    if place.is_file():
        yield from _rows(place)
        return
    for task in TASKS:
        found = json.loads((place / f"{task}.json").read_text(encoding="utf-8"))
        for one in found["examples"]:
            yield {"task": task, "input": one["input"], "target": one["target"]}


def served_name(client: Client) -> str:
    """The name by which the worker serves its model, once it has loaded it."""
    begin = time.monotonic()
    while time.monotonic() - begin < LOADING_SECONDS:
        for worker in read_workers(client.redis):
            if worker["names"]:  # none while it loads
                return str(worker["names"][-1])
        time.sleep(0.5)
    raise click.ClickException("the worker does not start: see worker.log")


@click.command()
@click.option("--model", required=True, help="GGUF file, folder or repository of the worker.")
@click.option("--gsm8k", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--bbh", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--folder", default="real-run", show_default=True, type=click.Path(path_type=Path))
@click.option("--limit", type=click.IntRange(min=1), default=None, help="Rows of each data set.")
@click.option("--max-tokens", default=256, show_default=True, help="Of an answer to GSM8K.")
def main(
    model: str, gsm8k: Path, bbh: Path, folder: Path, limit: int | None, max_tokens: int
) -> None:
    """Run both data sets, and print the commands, their output and a table."""
    folder = folder.resolve()
    if (folder / "results").exists():
        raise click.UsageError(f"{folder} has the results of an earlier call: choose another one")
    rows = prepare(folder, gsm8k, bbh, limit)
    with EmbeddedRedis(append_only=True) as server, Client(server.url) as client:
        begin = time.monotonic()
        worker = Worker(model, server.url, folder)
        try:
            real = RealRun(folder, server.url, client, worker, served_name(client))
            _run_all(real, rows, max_tokens)
        finally:
            worker.stop()
        minutes = (time.monotonic() - begin) / 60
    facts = ", ".join(f"{key} {value}" for key, value in environment("cpu").items())
    text = f"{real.table()}\n\n{minutes:.1f} minutes; {facts}\n"
    print(f"\n{text}")
    output = "\n".join(real.lines)
    (folder / "real-run.md").write_text(f"{text}\n```\n{output}\n```\n", encoding="utf-8")


def _run_all(real: RealRun, rows: dict[str, int], max_tokens: int) -> None:
    file = "gsm8k_test.jsonl"
    questions = ["--template", "question.jinja", "--few-shot", f"{file}:{SHOTS}"]
    questions += ["--max-tokens", str(max_tokens)]
    real.run("gsm8k", rows[file], file, *questions, "-o", "temperature=0", kills=True)
    real.command("score", "gsm8k", "--metric", "number")
    tasks = ["--template", "task.jinja", "--few-shot", f"bbh.jsonl:{SHOTS}", "--few-shot-by"]
    tasks += ["task", "--max-tokens", "64", "-o", "temperature=0"]
    real.run("bbh", rows["bbh.jsonl"], "bbh.jsonl", *tasks)
    real.command("score", "bbh", "--metric", "exact", "--by", "task")
    # One row of the tasks has an expected answer that is none of its options.
    choices = ["--mode", "choice", "--template", "task.jinja", "--choices", "options.jinja"]
    choices += ["--max-error-rate", "0.01"]
    real.run("bbh-choice", rows["bbh-options.jsonl"], "bbh-options.jsonl", *choices)
    real.command("score", "bbh-choice", "--metric", "choice", "--by", "task")
    sampled = ["-o", "temperature=0.8", "--seed", "1"]
    real.run("gsm8k-warm", rows[file], file, *questions, *sampled)
    real.command("score", "gsm8k-warm", "--metric", "number")
    real.command("diff", "gsm8k", "gsm8k-warm", "--rows", "2")
    real.command("report", "gsm8k", "gsm8k-warm", "-o", "gsm8k.html")
    real.command("results", "gsm8k", "--format", "openai-batch", "-o", "gsm8k-batch.jsonl")


if __name__ == "__main__":
    main()
