"""Files of rows: the formats that are read, and errors in the terms of the file."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import Client
from jobs.data_sets.text_rows import MAX_LINE
from tests.cli.conftest import Run

CSV = b"prompt,target\na,1\nb,2\n"
TSV = b"prompt\ttarget\na\t1\nb\t2\n"
JSONL = b'{"prompt": "a", "target": "1"}\n{"prompt": "b", "target": "2"}\n'


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


def named(value: object) -> str | None:
    """The id of a parameter: bytes are none, since those of gzip contain the time."""
    return "" if isinstance(value, bytes) else None


def parquet() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"prompt": ["a", "b"], "target": ["1", "2"]}), sink)
    return bytes(sink.getvalue().to_pybytes())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", CSV),
        ("a.tsv", TSV),
        ("a.TAB", TSV),
        ("a.jsonl", JSONL),
        ("a.csv", b"\xef\xbb\xbf" + CSV),
        ("a.json", b"\xef\xbb\xbf" + JSONL),
        ("a.csv.gz", gzip.compress(CSV)),
        ("a.tsv.gz", gzip.compress(TSV)),
        ("a.jsonl.gz", gzip.compress(JSONL)),
        ("a.gz", gzip.compress(JSONL)),
        ("a.csv.zst", zstd(CSV)),
        ("a.jsonl.zst", zstd(JSONL)),
        ("a.parquet", parquet()),
        ("a.pq", parquet()),
        ("a.dat", parquet()),
        ("a.jsonl", parquet()),
        ("a.parquet.gz", gzip.compress(parquet())),
        ("a.parquet.zst", zstd(parquet())),
    ],
    ids=named,
)
@pytest.mark.parametrize("piped", [False, True])
def test_a_format_is_read_whatever_compresses_it(
    run: Run, redis_url: str, tmp_path: Path, name: str, content: bytes, piped: bool
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    if piped and (".csv" in name or ".tsv" in name or name == "a.TAB"):
        return  # stdin has no name
    words = ("submit", "-" if piped else str(path), "-m", "m", "--redis", redis_url)
    done = run(*words, input=content if piped else None)
    assert done.exit_code == 0, done.output
    with Client(redis_url) as client:
        found = [client.job(job).request for job in done.stdout.split()]
    assert [(one.messages[0].text, one.job.target) for one in found] == [("a", "1"), ("b", "2")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "contains no rows"),
        ("a.csv", b"prompt\n", "contains no rows"),
        ("a.jsonl", b"\n\n", "contains no rows"),
        ("a.parquet", b"", "the file is empty"),
        ("a.parquet", CSV, "not Parquet, which begins with PAR1: name CSV .csv"),
        ("a.parquet", parquet()[:-20], "not a Parquet file that can be read"),
        ("a.csv", JSONL, "the header is a JSON object: name a file of such lines .jsonl"),
        ("a.jsonl", CSV, "line 1: not JSON: Expecting value at column 1; a row is a JSON object"),
        ("a.csv", TSV, "separated by tabs: name the file .tsv"),
        ("a.tsv", CSV, "separated by commas: name the file .csv"),
        ("a.csv", CSV.replace(b",", b";"), "separated by ';': save the file with commas"),
        ("a.csv", CSV.decode().encode("utf-16"), "text in UTF-16: save it as UTF-8"),
        ("a.jsonl", JSONL.decode().encode("utf-16"), "text in UTF-16: save it as UTF-8"),
        ("a.csv", b"prompt\nGr\xfc\xdfe\n", "line 2: not UTF-8 text"),
        ("a.csv.gz", gzip.compress(CSV * 99)[:-12], "gzip data of the file is damaged or cut off"),
        ("a.csv.zst", zstd(CSV * 99)[:-3], "zstd data of the file is damaged or cut off"),
        ("a.csv.bz2", bz2.compress(CSV), "compressed with bzip2: decompress it"),
        ("a.csv.xz", lzma.compress(CSV), "compressed with xz: decompress it"),
        ("a.xlsx", b"PK\x03\x04....", "spreadsheets (.xlsx) are: unpack it, or export it as CSV"),
        (
            "a.json",
            json.dumps([{"prompt": "a"}, {"prompt": "b"}], indent=1).encode(),
            "line 1: not JSON in one line: the file has JSON over several lines (pretty-printed): "
            "write each object on a line of its own",
        ),
        ("a.json", json.dumps({"prompt": "a"}, indent=1).encode(), "(pretty-printed)"),
        ("a.json", b'[\n{"prompt": "a"}\n]\n', "(pretty-printed)"),
    ],
    ids=named,
)
def test_what_is_not_read_is_named_once_for_what_it_is(
    run: Run, redis_url: str, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    assert_named_once(run, redis_url, tmp_path / name, content, message)


def test_a_line_that_is_too_long_when_unpacked_is_named(
    run: Run, redis_url: str, tmp_path: Path
) -> None:
    content = gzip.compress(b"a" * (MAX_LINE + 2), 1)
    assert_named_once(run, redis_url, tmp_path / "a.jsonl.gz", content, "the line has more than")


def assert_named_once(run: Run, redis_url: str, path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    done = run("submit", str(path), "-m", "m", "--redis", redis_url)
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert str(path) in done.stderr
    assert done.stderr.count(message) == 1
    assert "internal" not in done.stderr and "Traceback" not in done.stderr


def test_a_folder_is_named(run: Run, tmp_path: Path) -> None:
    done = run("submit", str(tmp_path), "-m", "m")
    assert done.exit_code == 2
    assert "Is a directory" in done.stderr


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"prompt": "a", "target": NaN}', "line 2: field 'target': NaN is not a value"),
        (
            "a.jsonl",
            '{"prompt": "a", "target": [Infinity]}',
            "line 2: field 'target': contains inf",
        ),
        ("a.jsonl", '{"prompt": "a", "target": {}}', "line 2: field 'target': expected a string"),
        ("a.jsonl", '{"prompt": "a", "custom_id": []}', "line 2: field 'custom_id': expected a"),
        ("a.jsonl", '{"prompt": "a", "task": 3}', "line 2: field 'task': expected a string, got 3"),
        ("a.jsonl", '{"prompt": 3}', "line 2: field 'prompt': "),
        ("a.jsonl", '{"text": {"a": 1}}', "line 2: field 'text': "),
        (
            "a.jsonl",
            '{"prompt": "a", "temperature": "hot"}',
            "line 2: field 'temperature': expected",
        ),
        ("a.csv", "a,x\nb,hot", "line 3: column 'temperature': expected a number, got 'hot'"),
    ],
)
def test_errors_name_the_file_the_row_and_the_column(
    run: Run, tmp_path: Path, name: str, content: str, message: str
) -> None:
    path = tmp_path / name
    first = "prompt,temperature\n" if name == "a.csv" else '{"prompt": "a"}\n'
    path.write_text(first + content.replace("a,x", "a,1"))
    done = run("submit", str(path), "-m", "m")
    assert done.exit_code == 2
    place = "" if message.startswith("line") else "line 2: "
    assert f"{path}: {place}{message}" in done.stderr
    assert "job." not in done.stderr and "messages[0]" not in done.stderr
    assert "metadata" not in done.stderr


@pytest.mark.parametrize(
    ("name", "row", "place"),
    [
        ("a.jsonl", '{"prompt": "a", "target": "b", "prompt": "c"}', "field 'prompt'"),
        ("a.jsonl", '{"messages": [{"role": "user", "role": "user"}]}', "field 'messages'[0].role"),
        ("a.jsonl", '{"body": {"model": "m", "model": "x"}}', "field 'body'.model"),
        ("a.jsonl", '{"body": {"seed": [{"a": 1, "a": 2}], "seed": 1}}', "field 'body'.seed"),
        ("a.jsonl", '{"prompt": "a", "x": {"a b": 1, "a b": 1}}', "field 'x'['a b']"),
        ("a.csv", '"{""a"": {""b"": 1, ""b"": 2}}",a', "column 'more'.a.b"),
        ("a.tsv", '"{""a"": 1, ""a"": 2}"\ta', "column 'more'.a"),
    ],
)
def test_a_key_that_an_object_has_twice_is_named(
    run: Run, tmp_path: Path, name: str, row: str, place: str
) -> None:
    path = tmp_path / name
    first = {".csv": "more,prompt", ".tsv": "more\tprompt"}.get(path.suffix, '{"prompt": "a"}')
    path.write_text(f"{first}\n{row}\n")
    mapped = () if name == "a.jsonl" else ("--map", "more=metadata")
    done = run("submit", str(path), "-m", "m", "--keep", "*", *mapped)
    assert done.exit_code == 2
    assert f"{path}: line 2: {place}: given twice in one object: keep one\n" in done.stderr


def test_a_key_that_a_map_of_a_parquet_file_has_twice_is_named(run: Run, tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.string())
    maps = pa.array([[("a", "1")], [("a", "1"), ("b", "2"), ("a", "3")]], kind)
    pq.write_table(pa.table({"prompt": ["a", "b"], "metadata": maps}), tmp_path / "a.parquet")
    done = run("submit", str(tmp_path / "a.parquet"), "-m", "m")
    assert done.exit_code == 2
    assert "row 2: column 'metadata': " in done.stderr
    assert "can't be read: it has the key 'a' twice" in done.stderr


@pytest.mark.parametrize(
    ("option", "place"),
    [('metadata={"a": 1, "a": 2}', "metadata.a"), ('metadata.b={"a": 1, "a": 2}', "metadata.b.a")],
)
def test_a_key_that_an_option_has_twice_is_named(run: Run, option: str, place: str) -> None:
    done = run("submit", "-", "-m", "m", "-o", option, input=b'{"prompt": "a"}')
    assert done.exit_code == 2
    assert f"{place}: given twice in one object: keep one" in " ".join(done.stderr.split())


def test_objects_are_text_in_cells_and_options_that_hold_text(run: Run, redis_url: str) -> None:
    user = '{"a": 1, "a": 2}'
    words = ("submit", "-", "-m", "m", "--redis", redis_url, "-o", f"user={user}")
    done = run(*words, input=json.dumps({"prompt": user}))
    assert done.exit_code == 0, done.output
    with Client(redis_url) as client:
        request = client.job(done.stdout.strip()).request
    assert request is not None and (request.user, request.messages[0].text) == (user, user)


def test_a_target_that_is_nan_in_a_parquet_file_is_named(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"], "answer": [1.0, float("nan")]}), path)
    words = ("submit", str(path), "-m", "m", "--map", "answer=target")
    done = run(*words)
    assert f"{path}: row 2: column 'answer': NaN is not a value: leave it empty" in done.stderr
    assert "row 1" not in done.stderr


ROWS = 30


def csv_file(path: Path, header: str) -> None:
    path.write_text(header + "\n" + "".join(f"q{i},a{i}\n" for i in range(ROWS)))


@pytest.mark.parametrize(
    ("header", "options", "error", "remedy"),
    [
        (
            "prompt,target",
            (),
            f"all {ROWS} lines: no model is given: name it with --model M, or in the column",
            ("--model", "m"),
        ),
        (
            "question,answer",
            ("-m", "m"),
            f"all {ROWS} lines: a row needs messages, prompt or text, and this one has 'question', "
            "'answer' (--map question=prompt takes 'question' as the prompt)",
            ("--map", "question=prompt", "--map", "answer=target"),
        ),
        (
            "prompt,level",
            ("-m", "m"),
            f"all {ROWS} lines: unknown field 'level'; --keep level keeps it in the results",
            ("--keep", "level"),
        ),
        (
            "prompt,target",
            ("-m", "m", "--tenant", "a b"),
            f"all {ROWS} lines: --tenant: must have 1 to 100 ASCII characters and no space",
            ("--tenant", "ab"),
        ),
        (
            "prompt,target",
            ("-m", "m", "-o", "temperature=hot"),
            f"all {ROWS} lines: -o temperature: expected a number, got 'hot'",
            ("-o", "temperature=0"),
        ),
    ],
)
def test_an_error_that_all_rows_have_is_said_once_with_a_remedy_that_works(
    run: Run,
    redis_url: str,
    tmp_path: Path,
    header: str,
    options: tuple[str, ...],
    error: str,
    remedy: tuple[str, ...],
) -> None:
    path = tmp_path / "a.csv"
    csv_file(path, header)
    words = ("submit", str(path), "--redis", redis_url)
    done = run(*words, *options)
    assert done.exit_code == 2
    first, last = done.stderr.splitlines()
    assert first.startswith(f"{path}: {error}")
    assert last == f"error: {ROWS} of {ROWS} lines are invalid; nothing was enqueued"
    done = run(*words, *options, *remedy)
    assert done.exit_code == 0, done.output
    assert len(done.stdout.split()) == ROWS


def test_rows_with_the_same_error_are_counted_and_others_are_named(
    run: Run, tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "a", "topp": 1}] * 9
    rows += [{"prompt": "a", "n": "x"}, {"prompt": "b"}, {"prompt": "a", "n": "x"}]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second, last = run("submit", str(path), "-m", "m").stderr.splitlines()
    assert first.startswith(f"{path}: lines 1, 2, 3, 4, 5 and 4 more: unknown field 'topp'")
    assert second.startswith(f"{path}: lines 10 and 12: field 'n': ")
    assert "11 of 12 lines are invalid" in last
    many = [{"prompt": "a", f"topp{number}": 1} for number in range(50)]
    path.write_text("\n".join(map(json.dumps, many)))
    lines = run("submit", str(path), "-m", "m").stderr.splitlines()
    assert len(lines) == 20 + 2
    assert lines[-2] == "… and 30 more"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("question", "'question' is not COLUMN=FIELD"),
        ("question=promt", "unknown field 'promt'; did you mean 'prompt'?"),
        ("prompt=my question", "names the field before the column: --map 'my question'=prompt"),
        ("question=input", "unknown field 'input'; known are messages, prompt, text, custom_id, "),
    ],
)
def test_a_wrong_map_is_wrong_usage(run: Run, option: str, message: str) -> None:
    done = run("submit", "-", "-m", "m", "--map", option, input=b"{}")
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())


def test_columns_of_any_format_are_mapped_and_two_for_one_field_are_refused(
    run: Run, redis_url: str, tmp_path: Path
) -> None:
    rows = [{"question": "a", "t": 0.5, "prompt_": "x"}]
    write: dict[str, Callable[[Path], Any]] = {
        "a.jsonl": lambda path: path.write_text(json.dumps(rows[0])),
        "a.csv": lambda path: path.write_text("question,t,prompt_\na,0.5,x\n"),
        "a.tsv": lambda path: path.write_text("question\tt\tprompt_\na\t0.5\tx\n"),
        "a.parquet": lambda path: pq.write_table(pa.Table.from_pylist(rows), path),
    }
    for name, make in write.items():
        make(tmp_path / name)
        words = ("submit", str(tmp_path / name), "-m", "m", "--redis", redis_url)
        names = ("--map", "question=prompt", "--map", "t=temperature")
        done = run(*words, *names, "--keep", "prompt_")
        assert done.exit_code == 0, (name, done.output)
        with Client(redis_url) as client:
            request = client.job(done.stdout.strip()).request
        assert request is not None
        assert (request.messages[0].text, request.temperature) == ("a", 0.5)
        twice = run(*words, *names, "--map", "prompt_=prompt")
        assert twice.exit_code == 2
        assert "the columns 'question' and 'prompt_' are both 'prompt'" in twice.stderr


@pytest.mark.parametrize("keep", [(), ("--keep", "*")])
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.tsv", "a.parquet"])
def test_a_map_of_a_column_that_the_file_lacks_is_refused_with_the_columns_that_it_has(
    run: Run, redis_url: str, tmp_path: Path, name: str, keep: tuple[str, ...]
) -> None:
    path = tmp_path / name
    row = {"prompt": "a", "gold": "1"}
    match path.suffix:
        case ".jsonl":
            path.write_text(json.dumps(row))
        case ".parquet":
            pq.write_table(pa.Table.from_pylist([row]), path)
        case suffix:
            tab = "\t" if suffix == ".tsv" else ","
            path.write_text(f"prompt{tab}gold\na{tab}1\n")
    words = ("submit", str(path), "-m", "m", "--redis", redis_url, *keep)
    done = run(*words, "--map", "gld=target")
    part = "field" if name == "a.jsonl" else "column"
    assert done.exit_code == 2
    assert done.stderr == (
        f"error: {path}: no {part} 'gld' for --map; the file has: 'prompt', 'gold'; "
        "nothing was enqueued\n"
    )
    assert run(*words, "--map", "gold=target").exit_code == 0


@pytest.mark.parametrize("column", ["messages", "prompt", "text", "question"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.tsv", "a.parquet"])
def test_a_prompt_that_is_empty_in_one_row_is_named_with_its_column(
    run: Run, tmp_path: Path, name: str, column: str
) -> None:
    path = tmp_path / name
    rows = [{column: "a", "answer": "1"}, {column: None, "answer": "2"}]
    names = ("--map", "question=prompt") if column == "question" else ()
    match path.suffix:
        case ".jsonl":
            path.write_text("\n".join(map(json.dumps, rows)))
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        case suffix:
            tab = "\t" if suffix == ".tsv" else ","
            path.write_text(f"{column}{tab}answer\na{tab}1\n{tab}2\n")
    done = run("submit", str(path), "-m", "m", "--map", "answer=target", *names)
    part = "field" if name == "a.jsonl" else "column"
    place = {"a.jsonl": "line 2", "a.parquet": "row 2"}.get(name, "line 3")
    mapped = " (prompt)" if names else ""
    assert done.exit_code == 2
    assert (
        f"{path}: {place}: a row needs messages, prompt or text, and its {part} {column!r}{mapped} "
        "is empty: fill it in, or remove the row\n"
    ) in done.stderr
    assert "prompt or text, and this one" not in done.stderr


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_each_row_may_fill_another_one_of_the_columns_of_the_prompt(
    run: Run, redis_url: str, tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    rows = [{"prompt": "a", "text": None}, {"prompt": None, "text": "b"}]
    if name == "a.parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("prompt,text\na,\n,b\n")
    done = run("submit", str(path), "-m", "m", "--redis", redis_url)
    assert done.exit_code == 0, done.output
    with Client(redis_url) as client:
        found = [client.job(job).request for job in done.stdout.split()]
    assert [one.messages[0].text for one in found if one is not None] == ["a", "b"]
