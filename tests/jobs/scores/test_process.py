"""Metrics in processes: errors, hangs, exits and memory cost one row."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.errors import InvalidRequest, JobError
from jobs.scores.process import Limits, MetricProcess, Scoring
from jobs.scores.spec import parse_spec
from tests.waiting import has_ended, wait_until

FUNCTIONS = """
import os, subprocess, sys, time

def behave(row):
    text = row["text"]
    if text == "raise": raise KeyError("x")
    if text == "hang":
        while True: pass
    if text == "sleep": time.sleep(1000)
    if text == "exit": sys.exit(3)
    if text == "abort": os.abort()
    if text == "memory": return len(bytearray(3 << 30))
    if text == "nan": return float("nan")
    if text == "text": return "good"
    if text == "print": print("noise")
    if text == "field": return row["metadata"]["n"]
    if text == "fork": return 8 if os.fork() else 9
    if text == "program": return len(subprocess.run(["cat"], capture_output=True).stdout)
    if text == "input": return len(sys.stdin.read())
    if text.startswith("forked "):  # and then it ends, or takes all CPU time
        pid = os.fork()
        if not pid: time.sleep(1000)
        with open(text.split()[2], "w") as file: file.write(str(pid))
        if text.split()[1] == "abort": os.abort()
        while True: pass
    if text == "dict": return {"value": True, "label": "fine", "explanation": 7}
    if text == "unknown": return {"value": 1, "note": ""}
    return os.getpid()
"""


@pytest.fixture
def reference(tmp_path: Path) -> str:
    file = tmp_path / "metrics.py"
    file.write_text(FUNCTIONS)
    return f"{file}:behave"


@pytest.fixture
def process(reference: str) -> Iterator[MetricProcess]:
    limits = Limits(seconds=0.5, max_bytes=1 << 30)
    one = MetricProcess(parse_spec(reference), limits)
    yield one
    one.close()


def score(process: MetricProcess, *texts: str) -> list[Scoring]:
    return process.score([{"text": text, "metadata": '{"n": 4}'} for text in texts])


def test_an_error_is_that_of_its_row(process: MetricProcess) -> None:
    first, error, last = score(process, "", "raise", "")
    assert error == Scoring(error="KeyError: 'x'")
    assert first.outcome is not None
    assert first == last  # of one process


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hang", "took more than 0.5 s of CPU time"),
        ("abort", "ended by SIGABRT"),
    ],
)
def test_a_row_that_ends_the_process_costs_no_other(
    process: MetricProcess, text: str, message: str
) -> None:
    before, ended, after = score(process, "", text, "")
    assert message in (ended.error or "")
    assert before.outcome is not None and after.outcome is not None
    assert before.outcome.value != after.outcome.value  # another process


def test_a_metric_that_waits_for_ever_is_ended(reference: str) -> None:
    process = MetricProcess(parse_spec(reference), Limits(wait_seconds=0.5))
    (asleep,) = score(process, "sleep")
    assert asleep.error == "the metric did not answer within 0.5 s"
    process.close()


def test_a_metric_that_is_stopped_while_its_process_starts_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = MetricProcess(parse_spec("exact"), Limits())
    popen = subprocess.Popen

    def started(*args: Any, **options: Any) -> Any:
        child = popen(*args, **options)
        process.stop()  # by another thread, which knows no child yet
        return child

    monkeypatch.setattr(subprocess, "Popen", started)
    with pytest.raises(JobError, match="scoring was stopped"):
        process.start()


def test_what_a_function_returns_is_checked(process: MetricProcess) -> None:
    found = score(process, "exit", "nan", "text", "unknown", "field", "dict", "print")
    errors = [one.error for one in found[:4]]
    assert errors[0] == "SystemExit: 3"
    assert "no finite number" in str(errors[1])
    assert "'good', which is no number" in str(errors[2])
    assert "a dict with value, note" in str(errors[3])
    values = [one.outcome for one in found[4:]]
    assert values[0] is not None and values[0].value == 4
    assert values[1] is not None and values[1].value == 1
    assert (values[1].label, values[1].explanation) == ("fine", "7")
    assert values[2] is not None  # what it prints is no reply


def test_each_row_has_its_own_value_if_a_metric_forks(process: MetricProcess) -> None:
    found = score(process, "fork", "field", "fork", "field")
    assert [one.outcome and one.outcome.value for one in found] == [8, 4, 8, 4]


def test_a_metric_and_its_programs_read_an_empty_input(reference: str) -> None:
    process = MetricProcess(parse_spec(reference), Limits())
    found = score(process, "program", "input", "field")
    process.close()
    assert [one.outcome and one.outcome.value for one in found] == [0, 0, 4]


@pytest.mark.parametrize(("way", "message"), [("abort", "SIGABRT"), ("spin", "of CPU time")])
def test_what_a_metric_has_started_ends_with_it(
    process: MetricProcess, tmp_path: Path, way: str, message: str
) -> None:
    pid = tmp_path / "pid"
    ended, after = score(process, f"forked {way} {pid}", "field")
    assert message in (ended.error or "")
    assert after.outcome is not None
    wait_until(lambda: has_ended(int(pid.read_text())))


def test_memory_is_limited(process: MetricProcess) -> None:
    full, after = score(process, "memory", "")
    assert full.error == "the metric needs more memory than --memory allows"
    assert after.outcome is not None


def test_a_pattern_that_backtracks_for_ever_is_ended() -> None:
    process = MetricProcess(parse_spec("regex:^(?:a+)+$"), Limits(seconds=0.5))
    rows = [{"text": text} for text in ("a" * 40 + "b", "b")]
    slow, quick = process.score(rows)
    process.close()
    assert "took more than 0.5 s of CPU time" in (slow.error or "")
    assert quick.outcome is not None and quick.outcome.value == 0


def test_a_metric_that_can_not_be_made_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    ends = tmp_path / "ends.py"
    ends.write_text("import sys; sys.exit(4)")
    for text, fact in (
        ("exact:nonsense", "unknown normalisation 'nonsense'"),
        (f"{tmp_path}/none.py:f", "there is no file .*none.py' with the metric 'f'"),
        (f"{broken}:f", "can't be imported: ZeroDivisionError"),
        (f"{ends}:f", "can't be imported: SystemExit: 4"),
        ("nomodule:f", "there is no module 'nomodule'$"),
        ("exakt:case", r"no module 'exakt' \(did you mean the metric exact\?\)"),
        ("os.path:nothing", "no function 'nothing'$"),
        ("os.path:dirnam", r"no function 'dirnam' \(did you mean dirname\?\)"),
    ):
        with pytest.raises(InvalidRequest, match=fact):
            MetricProcess(parse_spec(text), Limits()).start()


def test_ctrl_c_while_a_metric_is_loaded_leaves_no_process(tmp_path: Path) -> None:
    slow, pid = tmp_path / "slow.py", tmp_path / "pid"
    slow.write_text(
        "import os, pathlib, signal, time\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "time.sleep(1000)\n"
    )
    with pytest.raises(KeyboardInterrupt):
        MetricProcess(parse_spec(f"{slow}:f"), Limits()).start()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_missing_package_is_named_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rapidfuzz.py").write_text("raise ModuleNotFoundError('No module rapidfuzz')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(
        InvalidRequest, match=r"edit needs the package rapidfuzz: pip install .*scores"
    ):
        MetricProcess(parse_spec("edit"), Limits()).start()


def test_the_current_folder_hides_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('wrong json')")
    monkeypatch.chdir(tmp_path)
    process = MetricProcess(parse_spec("exact"), Limits())
    (one,) = process.score([{"text": "a", "target": "a"}])
    process.close()
    assert one.outcome is not None


def test_a_stopped_process_scores_no_more(process: MetricProcess) -> None:
    process.stop()
    with pytest.raises(JobError, match="stopped"):
        score(process, "")


def test_its_end_leaves_no_process(process: MetricProcess) -> None:
    (one,) = score(process, "")
    assert one.outcome is not None
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(one.outcome.value), 0)


def test_an_integer_of_many_digits_fits_a_schema(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer", "maximum": 7}')
    process = MetricProcess(parse_spec(f"json-schema:{schema}"), Limits())
    digits = "7" * 5000
    small, large = process.score([{"text": f"-{digits}"}, {"text": digits}])
    process.close()
    assert small.outcome is not None and large.outcome is not None, (small, large)
    assert (small.outcome.value, large.outcome.value) == (1, 0)
