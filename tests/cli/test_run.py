"""`chatjobs run`: each row of a data set is in Parquet once, whatever happens on the way."""

from __future__ import annotations

import csv
import gzip
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import Result

from jobs import ChatRequest
from jobs.cli import progress
from jobs.cli.progress import RunProgress
from jobs.data_sets.conventions import with_conventions
from jobs.data_sets.data_set import DataSet
from jobs.data_sets.requests import Overrides
from jobs.data_sets.source import ErrorRow, RequestRow
from jobs.errors import InvalidRequest
from jobs.results.compact import compact
from jobs.results.run_json import RunJson
from jobs.runs import producer
from jobs.runs.audit import audit as count_rows
from jobs.runs.data_set_run import DataSetRun
from jobs.runs.producer import Producer, Progress
from jobs.runs.written_rows import WrittenRows
from jobs.store.producer_lease import Holder, ProducerLease
from jobs.store.run_rows import RunRows
from tests.cli.conftest import Run
from tests.worker.site import Site, wait_until
from worker.prompt.sandbox import Sandbox

Go = Callable[..., Result]


@pytest.fixture
def go(run: Run, site: Site) -> Go:
    """`go(file, "--run", "r1")`: the command, with a worker's Redis and folder."""

    def call(file: Path, *words: str, model: str = "fake", name: str = "r1") -> Result:
        places = ("--redis", site.url, "--results", str(site.folder))
        return run("run", str(file), "-m", model, "--run", name, *places, *words)

    return call


def jsonl(folder: Path, rows: Sequence[Any], name: str = "data.jsonl") -> Path:
    file = folder / name
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    file.write_text("\n".join(lines) + "\n")
    return file


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"row {number}", "target": str(number)} for number in range(count)]


def audit(result: Result) -> str:
    return result.stdout.splitlines()[-1]


def test_each_row_of_a_file_is_in_parquet_once(go: Go, site: Site, tmp_path: Path) -> None:
    site.worker()
    result = go(jsonl(tmp_path, prompts(30)), "--window", "8")
    assert (result.exit_code, audit(result)) == (
        0,
        "r1: 30 in, 30 rows, 0 missing, 0 twice, 0 failed",
    ), result.stderr
    rows = sorted(site.rows("r1"), key=lambda row: row["row_index"])
    assert [row["row_index"] for row in rows] == list(range(30))
    assert [row["target"] for row in rows] == [str(number) for number in range(30)]
    assert rows[7]["messages"][0]["content"] == "row 7"


def test_run_json_has_the_size_of_the_whole_run(go: Go, site: Site, tmp_path: Path) -> None:
    site.worker()
    file = jsonl(tmp_path, prompts(3))
    assert go(file, "--num-samples", "2", "--limit", "2").exit_code == 0
    assert RunJson.read(site.folder / "r1").expected == 4


def test_the_progress_ends_with_the_number_of_rows(
    go: Go, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.worker()
    file = tmp_path / "data.csv"
    file.write_text('question\n"1\n+ 1?"\n"2\n+ 2?"\n')  # two rows on four lines
    assert go(file).exit_code == 0
    shown: list[tuple[int, int | None]] = []

    def update(self: RunProgress, done: int, total: int | None, *_: int) -> None:
        shown.append((done, total))

    monkeypatch.setattr(RunProgress, "update", update)
    assert "nothing to do" in go(file).stderr
    assert shown[-1] == (2, 2)


def test_the_speed_in_tokens_is_shown_when_rows_are_in_parquet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "RUN_LINE_SECONDS", 0.0)
    with RunProgress(quiet=False) as shown:
        for done, tokens in ((0, 0), (2, 0), (2, 50)):
            shown.update(done, 4, tokens, 0)
    first, second, third = capsys.readouterr().err.splitlines()
    assert first == "0/4 rows"
    assert "2/4 rows, " in second and "tokens/s" not in second
    assert " tokens/s" in third


def test_no_job_and_no_reservation_is_left_in_redis(go: Go, site: Site, tmp_path: Path) -> None:
    site.worker()
    assert go(jsonl(tmp_path, prompts(12))).exit_code == 0
    left = [key.decode() for key in site.redis.keys("*")]
    kinds = ("chatjobs:rows:", "chatjobs:producer:", "rq:job:", "rq:results:")
    assert [key for key in left if key.startswith(kinds)] == []


def test_the_same_command_again_does_nothing(go: Go, site: Site, tmp_path: Path) -> None:
    site.worker()
    file = jsonl(tmp_path, prompts(5))
    assert go(file).exit_code == 0
    before = site.written("r1")
    again = go(file)
    assert again.exit_code == 0
    assert "nothing to do: all rows were done before" in again.stderr
    assert site.written("r1") == before


def test_a_bad_row_is_a_row_with_an_error_and_its_line(go: Go, site: Site, tmp_path: Path) -> None:
    site.worker()
    rows = [
        {"prompt": "good", "custom_id": "a"},
        '{"prompt": ',
        {"custom_id": "c"},
        {"prompt": "again", "custom_id": "a"},
        {"prompt": "p", "temperature": "hot", "custom_id": "e"},
        '{"prompt": "\\ud800"}',
        {"prompt": "fine"},
        {"prompt": "p", "job": {"repeat": 2}},
    ]
    result = go(jsonl(tmp_path, rows))
    assert result.exit_code == 1
    assert audit(result) == "r1: 8 in, 8 rows, 0 missing, 0 twice, 6 failed"
    assert "6 of 8 rows failed (invalid_request 6)" in result.stderr
    found = {row["row_index"]: row for row in site.rows("r1")}
    errors = {n: row["error_message"] for n, row in found.items() if row["status"] == "error"}
    assert errors[1].startswith("line 2: not JSON")
    assert errors[2].startswith("line 3: a row needs messages, prompt or text")
    assert errors[3].startswith("line 4: field 'custom_id': line 1 of the file has 'a' as well")
    assert errors[4].startswith("line 5: field 'temperature'")
    assert errors[7].startswith("line 8: field 'job'.repeat: ")
    assert [found[n]["custom_id"] for n in (2, 3, 4)] == ["c", "a", "e"]
    assert found[1]["model"] == "fake"


def test_what_no_row_can_be_run_with_is_refused_before_the_first_job(
    go: Go, site: Site, tmp_path: Path
) -> None:
    for rows, fact in (
        ([{"problem": "2+3?"}], "the first row can't be run: line 1: a row needs messages"),
        ([], "there are no rows"),
    ):
        result = go(jsonl(tmp_path, rows))
        assert result.exit_code == 2
        assert fact in result.stderr, result.stderr
    assert not site.redis.exists("rq:queue:bulk:fake")
    assert not (site.folder / "r1").exists()


def test_columns_are_found_by_convention_or_named(go: Go, site: Site, tmp_path: Path) -> None:
    site.worker()
    file = tmp_path / "data.csv"
    file.write_text("question,answer,level\n1+1?,2,easy\n2+2?,4,hard\n")
    result = go(file, "--keep", "level")
    assert result.exit_code == 0, result.stderr
    rows = sorted(site.rows("r1"), key=lambda row: row["row_index"])
    assert [(row["messages"][0]["content"], row["target"]) for row in rows] == [
        ("1+1?", "2"),
        ("2+2?", "4"),
    ]
    assert json.loads(rows[1]["metadata"]) == {"level": "hard"}
    named = go(file, "--map", "level=prompt", name="r2")
    assert named.exit_code == 0, named.stderr
    unused = (
        "question, answer (--keep COLUMN writes one to the results, "
        "--map COLUMN=target compares answers with one)\n"
    )
    assert f"columns that are not used: {unused}" in named.stderr
    tried = go(file, "--map", "level=prompt", "--dry-run", name="r3")
    assert f"not used    {unused}" in tried.stdout
    assert f"rows: {site.folder}/r2/samples/*.parquet\n" in named.stderr
    named = go(file, name="r4")
    assert "not used: level (--keep COLUMN writes one to the results)\n" in named.stderr
    assert {row["messages"][0]["content"] for row in site.rows("r2")} == {"easy", "hard"}


def test_lines_of_an_openai_batch_file(go: Go, site: Site, tmp_path: Path) -> None:
    site.worker()
    rows = [
        {
            "custom_id": f"request-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "x", "messages": [{"role": "user", "content": str(number)}]},
        }
        for number in range(4)
    ]
    assert go(jsonl(tmp_path, rows)).exit_code == 0
    assert {row["custom_id"] for row in site.rows("r1")} == {f"request-{n}" for n in range(4)}


def test_a_file_of_the_rows_is_written_when_the_run_is_done(
    go: Go, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    site.worker()
    file = jsonl(tmp_path, [*prompts(3), "{"], "r1.jsonl")
    refused = go(file, "--format", "jsonl")
    assert refused.exit_code == 2
    assert "--output r1.jsonl is a file of the data set" in refused.stderr
    assert go(file, "--output", "x").exit_code == 2
    result = go(file, "--format", "csv")
    assert result.exit_code == 1  # a row has failed
    assert "r1.csv: 4 rows" in result.stderr
    with (tmp_path / "r1.csv").open(newline="") as text:
        assert [row["row_index"] for row in csv.DictReader(text)] == ["0", "1", "2", "3"]


def test_a_folder_of_a_data_set_needs_a_split(go: Go, site: Site, tmp_path: Path) -> None:
    site.worker()
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    for name, count in (("train-00000-of-00002", 2), ("train-00001-of-00002", 3), ("test-0", 1)):
        table = pa.table({"prompt": [f"{name} {n}" for n in range(count)]})
        pq.write_table(table, folder / "data" / f"{name}.parquet")
    refused = go(folder)
    assert refused.exit_code == 2
    assert "has several splits (test, train): choose one with --split" in refused.stderr
    assert go(folder, "--split", "train").exit_code == 0
    rows = sorted(site.rows("r1"), key=lambda row: row["row_index"])
    assert [row["messages"][0]["content"] for row in rows] == [
        *(f"train-00000-of-00002 {n}" for n in range(2)),
        *(f"train-00001-of-00002 {n}" for n in range(3)),
    ]


def test_a_changed_configuration_is_named_and_refused(go: Go, site: Site, tmp_path: Path) -> None:
    site.worker()
    file = jsonl(tmp_path, prompts(4))
    assert go(file, "--limit", "2", "-o", "temperature=0").exit_code == 0
    other = go(file, "-o", "temperature=1", "--limit", "1")
    assert other.exit_code == 2
    assert "options.temperature: 0 → 1" in other.stderr
    assert "limit: 2 → 1" in other.stderr
    more = go(file, "-o", "temperature=0")
    assert (more.exit_code, audit(more)) == (0, "r1: 4 in, 4 rows, 0 missing, 0 twice, 0 failed")
    jsonl(tmp_path, prompts(5))
    changed = go(file, "-o", "temperature=0")
    assert changed.exit_code == 2
    assert "the content of the data set has changed" in changed.stderr


def test_failed_rows_are_run_again_if_asked(go: Go, site: Site, tmp_path: Path) -> None:
    worker = site.worker()
    rows = [
        {"prompt": "a"},
        {"prompt": "b", "metadata": {"fail": "timeout"}},
        {"prompt": "c", "job": {"id": "own"}},
    ]
    file = jsonl(tmp_path, rows)
    first = go(file)
    assert first.exit_code == 1
    assert audit(first) == "r1: 3 in, 3 rows, 0 missing, 0 twice, 2 failed"
    assert go(file).exit_code == 1  # they count as done
    jobs = {row["row_index"]: (row["job_id"], row["finished_at"]) for row in site.rows("r1")}
    again = go(file, "--retry-failed")
    assert audit(again) == "r1: 3 in, 3 rows, 0 missing, 0 twice, 2 failed"
    after = {row["row_index"]: (row["job_id"], row["finished_at"]) for row in site.rows("r1")}
    assert len(site.written("r1")) == 3
    assert after[0] == jobs[0]
    assert after[1][1] > jobs[1][1]
    assert worker.alive


def test_a_run_stops_when_too_many_rows_fail(go: Go, site: Site, tmp_path: Path) -> None:
    site.worker()
    rows = [
        {"prompt": "p", "metadata": {"fail": "timeout"} if number % 2 else {}}
        for number in range(400)
    ]
    file = jsonl(tmp_path, rows)
    result = go(file, "--max-error-rate", "0.2", "--window", "10")
    assert result.exit_code == 1
    assert "more than --max-error-rate 0.2" in result.stderr
    assert 100 <= len(site.written("r1")) < 400
    assert go(file, "--max-error-rate", "0.5").exit_code == 0


def test_the_audit_counts_what_the_files_hold(go: Go, site: Site, tmp_path: Path) -> None:
    site.worker()
    file = jsonl(tmp_path, prompts(6))
    assert go(file).exit_code == 0
    (part,) = site.results.files("r1")
    (part.parent / "part-copy.parquet").write_bytes(part.read_bytes())
    twice = go(file)
    assert twice.exit_code == 1
    assert audit(twice) == "r1: 6 in, 6 rows, 0 missing, 6 twice, 0 failed"


def test_the_audit_counts_rows_that_other_readers_see(go: Go, site: Site, tmp_path: Path) -> None:
    site.worker()
    file = jsonl(tmp_path, prompts(6))
    assert go(file).exit_code == 0
    (part,) = site.results.files("r1")
    older = pq.read_table(part).slice(0, 2)
    place = older.schema.get_field_index("attempt")
    older = older.set_column(place, older.schema.field(place), pa.array([0, 0], pa.int16()))
    pq.write_table(older, part.parent / "part-older.parquet")
    found = go(file, "--json")
    assert found.exit_code == 1
    counts = json.loads(found.stdout)
    assert (counts["rows"], counts["twice"], counts["superseded"]) == (6, 0, 2)
    assert "2 superseded (chatjobs results compact removes them)" in found.stderr
    content = part.read_bytes()
    assert compact(site.results, "r1") == 2
    part.write_bytes(content)  # a recorder that was frozen
    assert count_rows(site.results, "r1", 6).superseded == 6
    again = go(file)
    assert (again.exit_code, audit(again)) == (0, "r1: 6 in, 6 rows, 0 missing, 0 twice, 0 failed")
    assert not part.exists()


def test_rows_in_a_damaged_file_are_not_generated_again(go: Go, site: Site, tmp_path: Path) -> None:
    site.worker()
    file = jsonl(tmp_path, prompts(3))
    assert go(file).exit_code == 0
    (part,) = site.results.files("r1")
    content = part.read_bytes()
    part.write_bytes(content[:-9])
    refused = go(file)
    assert refused.exit_code == 2
    assert f"{part} can't be read (" in refused.stderr
    assert "restore it, or delete it to run its rows again" in refused.stderr
    assert site.results.config("r1")["state"] == "done"
    assert not site.redis.keys("rq:job:*")
    part.write_bytes(content)
    assert audit(go(file)) == "r1: 3 in, 3 rows, 0 missing, 0 twice, 0 failed"


def test_a_folder_that_the_workers_do_not_write_to_is_refused(
    go: Go, run: Run, site: Site, tmp_path: Path
) -> None:
    site.worker()
    wait_until(lambda: site.redis.exists("chatjobs:results"))
    words = ("-m", "fake", "--redis", site.url, "--results", str(tmp_path / "other"))
    result = run("run", str(jsonl(tmp_path, prompts(1))), *words)
    assert result.exit_code == 3
    assert "is not the results folder of the workers on this Redis" in result.stderr


def test_several_samples_of_a_row_have_seeds_of_their_own(
    go: Go, site: Site, tmp_path: Path
) -> None:
    site.worker()
    rows = [{"prompt": "a", "custom_id": "x"}, {"prompt": 1.5}]
    file = jsonl(tmp_path, rows)
    result = go(file, "--num-samples", "3", "--seed", "7")
    assert audit(result) == "r1: 2 in with 3 samples each, 6 rows, 0 missing, 0 twice, 3 failed"
    found = {(row["row_index"], row["repeat_index"]): row for row in site.rows("r1")}
    assert sorted(found) == [(row, repeat) for row in range(2) for repeat in range(3)]
    assert {found[0, repeat]["custom_id"] for repeat in range(3)} == {"x"}
    assert {found[1, repeat]["status"] for repeat in range(3)} == {"error"}
    retried = go(file, "--num-samples", "3", "--seed", "7", "--retry-failed")
    assert audit(retried) == audit(result)


def test_each_sample_has_a_seed_that_follows_from_that_of_the_run(tmp_path: Path) -> None:
    file = jsonl(tmp_path, [{"prompt": "a"}, {"prompt": "b", "seed": 5}])

    def seeds(seed: int | None) -> list[int | None]:
        overrides = Overrides("m", "r", ignore_unknown=True, own_ids=True)
        with DataSet([file], overrides, seed=seed, samples=3) as source:
            rows = list(source.read(lambda number: True))
        requests = [row.request for row in rows if row is not None]
        return [one.seed if isinstance(one, ChatRequest) else None for one in requests]

    assert len(set(seeds(7))) == 6
    assert seeds(7) == seeds(7)
    assert seeds(7)[:3] != seeds(8)[:3]
    assert seeds(7)[3] == 5  # its own
    assert seeds(None)[:3] == [None, None, None]


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    file = jsonl(tmp_path, [{"prompt": "a"}, {"prompt": "b"}])
    with DataSet([file], Overrides("m", "r1", own_ids=True)) as source:
        source.content()
        os.utime(file, ns=(1, 1))  # its content is the same
        assert len(list(source.read(lambda _: True))) == 2
        with file.open("a") as opened:
            opened.write('{"prompt": "c"}\n')
        with pytest.raises(InvalidRequest, match="the file has changed while it was read"):
            list(source.read(lambda _: True))


def test_a_pipe_is_a_data_set_with_a_name_for_its_run(
    go: Go, run: Run, site: Site, tmp_path: Path
) -> None:
    site.worker()
    pipe = tmp_path / "rows.csv"
    os.mkfifo(pipe)
    nameless = run("run", str(pipe), "-m", "fake", "--redis", site.url)
    assert (nameless.exit_code, "name it with --run" in nameless.stderr) == (2, True)
    writer = threading.Thread(target=pipe.write_text, args=("question,answer\na,1\nb,2\n",))
    writer.start()
    result = go(pipe)
    writer.join()
    assert audit(result).startswith("r1: 2 in, 2 rows, 0 missing"), result.stderr
    assert {row["target"] for row in site.rows("r1")} == {"1", "2"}


def test_the_copy_of_a_pipe_has_no_name_that_a_killed_run_would_leave(
    go: Go, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.worker()
    temporary, pipe = tmp_path / "temporary", tmp_path / "rows.csv"
    temporary.mkdir()
    os.mkfifo(pipe)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    left: list[list[Path]] = []
    copy, execute = shutil.copyfileobj, DataSetRun.execute

    def copied(*files: Any) -> None:
        copy(*files)
        left.append([*temporary.rglob("*.csv")])

    def executed(self: DataSetRun, *words: Any) -> Any:
        left.append([*temporary.iterdir()])
        return execute(self, *words)

    monkeypatch.setattr(shutil, "copyfileobj", copied)
    monkeypatch.setattr(DataSetRun, "execute", executed)
    writer = threading.Thread(target=pipe.write_text, args=("question,answer\na,1\nb,2\n",))
    writer.start()
    result = go(pipe)
    writer.join()
    assert audit(result).startswith("r1: 2 in, 2 rows, 0 missing"), result.stderr
    assert left == [[], []]


def test_columns_are_found_by_convention_behind_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_text("")
    (tmp_path / "1.jsonl").write_text('{"question": "a", "answer": "1"}\n')
    files = sorted(tmp_path.glob("*.jsonl"))
    overrides = with_conventions(Overrides("m", "r1", own_ids=True), files)
    with DataSet(files, overrides) as source:
        source.check()
        (row,) = source.read(lambda _: True)
    assert isinstance(row, RequestRow) and isinstance(row.request, ChatRequest)
    assert row.request.job.target == "1"


@pytest.mark.parametrize("mode", ["chat", "perplexity"])
@pytest.mark.parametrize(
    "first",
    [
        {"text": 5, "custom_id": "x"},
        {"text": "a", "custom_id": "x"},
        {"text": "a", "job": {"custom_id": "x"}},
        {"custom_id": "x"},
    ],
)
def test_a_custom_id_is_taken_by_the_same_row_when_a_run_goes_on(
    tmp_path: Path, mode: str, first: dict[str, Any]
) -> None:
    """Whether the first row with it is read again, skipped, or invalid."""
    if mode == "perplexity" and "job" in first:
        return  # no column of this mode
    file = jsonl(tmp_path, [first, {"text": "b", "custom_id": "x"}])
    overrides = Overrides("m", "r1", own_ids=True, ignore_unknown=True, mode=mode)
    with DataSet([file], overrides) as source:
        for wanted in ((0, 1), (1,)):
            *_, last = source.read(wanted.__contains__)
            assert isinstance(last, ErrorRow)
            assert "line 1 of the file has 'x' as well" in last.error.message


def test_a_template_that_is_too_slow_is_refused_after_three_rows(
    go: Go, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.prompt.sandbox.RENDER_SECONDS", 0.5)
    rows: list[str] = []
    render = Sandbox.render

    def counted(self: Sandbox, template: str, values: Any) -> str:
        rows.append(values["prompt"])
        return render(self, template, values)

    monkeypatch.setattr(Sandbox, "render", counted)
    template = tmp_path / "prompt.jinja"
    template.write_text(
        "{{ prompt }}{% if prompt != 'row 1' %}{% for a in range(99999) %}"
        "{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    )
    result = go(jsonl(tmp_path, prompts(50)), "--template", str(template))
    assert (result.exit_code, len(rows)) == (2, 4), result.stderr
    assert "for 3 of the first 4 rows, as for line 4: correct the template" in result.stderr
    assert "exceeds the limits of the sandbox" in result.stderr
    assert site.redis.keys("rq:job:*") == []


def test_a_template_makes_the_prompts(go: Go, site: Site, tmp_path: Path) -> None:
    site.worker()
    template = tmp_path / "prompt.jinja"
    template.write_text(
        "{{ question }} ({{ level }}){% if level == 'bad' %}{{ nothing }}{% endif %}"
    )
    rows = [
        {"question": "1+1?", "answer": 2, "level": "easy"},
        {"question": "2+2?", "answer": 4, "level": "bad"},
        {"question": "3+3?", "answer": 6},
    ]
    file = jsonl(tmp_path, rows)
    result = go(file, "--template", str(template))
    assert audit(result) == "r1: 3 in, 3 rows, 0 missing, 0 twice, 2 failed"
    found = {row["row_index"]: row for row in site.rows("r1")}
    assert found[0]["messages"][0]["content"] == "1+1? (easy)"
    assert found[0]["target"] == "2"
    assert (
        "line 2: the prompt template fails on these columns: 'nothing'" in found[1]["error_message"]
    )
    assert "'level' is undefined" in found[2]["error_message"]
    template.write_text("{{ question }}")
    changed = go(file, "--template", str(template))
    assert changed.exit_code == 2
    assert "template: " in changed.stderr
    template.write_text("{% if %}")
    wrong = go(file, "--template", str(template), name="r2")
    assert wrong.exit_code == 2
    assert "the prompt template is not valid Jinja" in wrong.stderr


def test_examples_come_before_each_prompt_but_never_its_own(
    go: Go, site: Site, tmp_path: Path
) -> None:
    site.worker()
    shots = jsonl(
        tmp_path,
        [{"question": f"q{number}", "answer": f"a{number}"} for number in range(4)],
        "train.jsonl",
    )
    system = {"role": "system", "content": "Be brief."}
    rows = [
        {"messages": [system, {"role": "user", "content": "new"}]},
        {"messages": [{"role": "user", "content": "q1"}]},
    ]
    result = go(jsonl(tmp_path, rows), "--few-shot", f"{shots}:2")
    assert result.exit_code == 0, result.stderr
    found = {row["row_index"]: row for row in site.rows("r1")}
    texts = {n: [one["content"] for one in row["messages"]] for n, row in found.items()}
    assert texts == {
        0: ["Be brief.", "q0", "a0", "q1", "a1", "new"],
        1: ["q0", "a0", "q2", "a2", "q1"],
    }
    few = go(jsonl(tmp_path, rows), "--few-shot", f"{shots}:9", name="r2")
    assert few.exit_code == 2
    assert "has 4 rows, and 9 are wanted" in few.stderr


def test_examples_have_the_value_that_their_row_has_in_a_column(
    go: Go, site: Site, tmp_path: Path
) -> None:
    site.worker()
    shots = jsonl(
        tmp_path,
        [
            {"question": f"{kind}{number}", "answer": f"a{number}", "level": kind}
            for number in range(3)
            for kind in (1, 2)
        ],
        "dev.jsonl",
    )
    rows: list[dict[str, Any]] = [
        {"question": "new", "level": "2"},
        {"question": "11", "level": 1},
        {"question": "new", "level": 3},
    ]
    words = ("--few-shot", f"{shots}:2", "--few-shot-by")
    result = go(jsonl(tmp_path, rows), *words, "level")
    assert audit(result) == "r1: 3 in, 3 rows, 0 missing, 0 twice, 1 failed"
    *found, bad = sorted(site.rows("r1"), key=lambda row: row["row_index"])
    assert [[one["content"] for one in row["messages"]] for row in found] == [
        ["20", "a0", "21", "a1", "new"],
        ["10", "a0", "12", "a2", "11"],
    ]
    assert bad["error_message"].endswith("has 0 rows with level '3', and 2 are wanted")
    changed = go(jsonl(tmp_path, rows), *words[:2])
    assert changed.exit_code == 2 and 'few-shot.by: "level" → none' in changed.stderr
    for file, column in ((rows, "grade"), ([{**one, "grade": 1} for one in rows], "grade")):
        refused = go(jsonl(tmp_path, file), *words, column, name="r2")
        assert refused.exit_code == 2
        assert "'grade' of --few-shot-by" in refused.stderr


def test_rows_that_begin_alike_are_enqueued_one_behind_the_other(
    site: Site, tmp_path: Path
) -> None:
    rows = [
        {
            "messages": [
                {"role": "system", "content": f"system {number % 3}"},
                {"role": "user", "content": str(number)},
            ]
        }
        for number in range(30)
    ]
    names: list[str] = []

    class Watcher:
        """Stops once jobs are in the queue."""

        def update(self, progress: Progress) -> bool:
            if progress.running and not names:
                for job in site.redis.lrange("rq:queue:bulk:fake", 0, -1):
                    messages = site.client.job(job.decode()).request.messages
                    names.append(messages[0].text)
            return not names

        def waits_for(self, holder: Holder) -> None:
            raise AssertionError(holder)

    overrides = Overrides("fake", "r1", ignore_unknown=True, own_ids=True)
    lease = ProducerLease(site.redis, "r1")
    with DataSet([jsonl(tmp_path, rows)], overrides) as source, lease:
        redis, written = RunRows(site.redis, lease), WrittenRows(site.results, "r1")
        assert Producer(redis, written, source, Watcher(), window=2000).run() == "stopped"
    assert names == sorted(names) and len(set(names)) == 3


def test_rows_that_can_not_run_are_bounded_in_redis_as_well(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producer, "MAX_ENDED", 10)
    unwritten: list[int] = []

    class Watcher:
        def update(self, progress: Progress) -> bool:
            unwritten.append(progress.unwritten)
            return True

        def waits_for(self, holder: Holder) -> None:
            raise AssertionError(holder)

    site.worker()
    overrides = Overrides("fake", "r1", ignore_unknown=True, own_ids=True)
    lease = ProducerLease(site.redis, "r1")
    with DataSet([jsonl(tmp_path, [{"prompt": 1}] * 60)], overrides) as source, lease:
        redis, written = RunRows(site.redis, lease), WrittenRows(site.results, "r1")
        assert Producer(redis, written, source, Watcher(), window=5).run() == "done"
    assert 10 <= max(unwritten) < 15
    assert written.errors == {"invalid_request": 60}


def test_a_folder_that_hugging_face_has_saved(go: Go, site: Site, tmp_path: Path) -> None:
    site.worker()
    folder = tmp_path / "saved"
    for split, words in (("train", ["a", "b"]), ("test", ["c"])):
        (folder / split).mkdir(parents=True)
        table = pa.table({"question": words, "answer": words})
        with pa.ipc.new_stream(folder / split / "data-0.arrow", table.schema) as writer:
            writer.write_table(table)
        state = {"_data_files": [{"filename": "data-0.arrow"}]}
        (folder / split / "state.json").write_text(json.dumps(state))
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    refused = go(folder)
    assert "has several splits (train, test): choose one with --split" in refused.stderr
    result = go(folder, "--split", "train", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["rows"] == 2
    assert {row["target"] for row in site.rows("r1")} == {"a", "b"}


def test_rows_before_the_break_of_an_arrow_stream_are_in_the_files(
    go: Go, site: Site, tmp_path: Path
) -> None:
    site.worker()
    folder = tmp_path / "saved"
    folder.mkdir()
    table = pa.table({"prompt": [f"say {n}" for n in range(90)]})
    names = ["data-0.arrow", "data-1.arrow"]
    for name in names:
        with pa.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table, max_chunksize=30)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": n} for n in names]})
    )
    whole = (folder / names[1]).read_bytes()
    (folder / names[1]).write_bytes(whole[: len(whole) - 100])
    for _ in range(2):  # the rows before are done then
        result = go(folder)
        assert result.exit_code == 2, result.output
        assert "data-1.arrow: the Arrow stream is damaged or cut off after row 60" in result.stderr
        assert sorted(row["row_index"] for row in site.rows("r1")) == [*range(150)]
    assert site.results.config("r1")["state"] == "running"
    (folder / names[1]).write_bytes(whole[:-8])
    result = go(folder, "--run", "r2")
    assert result.exit_code == 2
    assert "cut off after row 90" in result.stderr and "end is missing" in result.stderr
    (folder / names[1]).write_bytes(whole)
    assert go(folder, "--run", "r3").exit_code == 0


def test_the_name_of_a_run_follows_from_data_set_and_model(
    run: Run, site: Site, tmp_path: Path
) -> None:
    site.worker()
    file = tmp_path / "my data-1.1.jsonl.gz"  # and 1.2 is another
    file.write_bytes(gzip.compress(b'{"prompt": "a"}\n'))
    places = ("--redis", site.url, "--results", str(site.folder))
    result = run("run", str(file), "-m", "fake", *places)
    assert audit(result).startswith("my-data-1.1-fake: 1 in, 1 rows")
    assert site.results.config("my-data-1.1-fake")["state"] == "done"
    file.with_suffix("").write_bytes(b'{"prompt": "a"}\n')  # the same content
    assert run("run", str(file.with_suffix("")), "-m", "fake", *places).exit_code == 0
    file.write_bytes(file.read_bytes()[:-6])
    damaged = run("run", str(file), "-m", "fake", *places)
    assert damaged.exit_code == 2
    assert "the gzip data of the file is damaged or cut off" in damaged.stderr


def test_a_run_that_other_commands_have_made_is_not_continued(
    go: Go, site: Site, tmp_path: Path
) -> None:
    site.submit("a", run="r1")
    site.burst()
    result = go(jsonl(tmp_path, prompts(2)))
    assert result.exit_code == 2
    assert "run 'r1'" in result.stderr and "was not made by chatjobs run" in result.stderr
