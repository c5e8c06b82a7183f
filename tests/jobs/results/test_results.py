"""Result data sets: rows of outbox entries, and files that every reader can read."""

from __future__ import annotations

import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs import Results
from jobs.api.sampling import Sampling
from jobs.errors import InvalidRequest, JobError
from jobs.results.files import table_of, write_part, write_run_card
from jobs.results.outbox import DEFAULT_RUN, decode, encode, outbox_entry, row_index_of, run_of
from jobs.results.rows import rows_of
from jobs.results.schema import SCHEMA, leaves
from worker.backend import ModelInfo

REQUEST = {
    "model": "demo",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "3"}],
        },
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
    ],
    "stop": "\n",
    "max_completion_tokens": 7,
    "logit_bias": {"5": 1.5},
    "metadata": {"source": "test"},
    "job": {
        "run": "r1",
        "row": 4,
        "custom_id": "mine",
        "target": "5",
        "session": "s1",
        "tags": ["a", "b"],
    },
}
PROVENANCE = {"revision": "abc", "fingerprint": "f00", "dtype": "bfloat16", "engine": "chatjobs"}


def token(text: str, logprob: float, top: list[tuple[str, float]] = ()) -> dict:  # type: ignore[assignment]
    tops = [{"token": t, "logprob": p, "bytes": None} for t, p in top]
    return {"token": text, "logprob": logprob, "bytes": None, "top_logprobs": tops}


def ok_entry(row: int = 4, job_id: str = "j1", choices: int = 1, logprobs: bool = False):
    answers = []
    for index in range(choices):
        content = [token("5", -0.25, [("5", -0.25), ("6", -1.5)]), token(".", -0.5)]
        answers.append(
            {
                "index": index,
                "message": {"role": "assistant", "content": f"5.{index}"},
                "finish_reason": "stop",
                "logprobs": {"content": content} if logprobs else None,
            }
        )
    usage = {"prompt_tokens": 9, "completion_tokens": 2 * choices, "total_tokens": 9 + 2 * choices}
    request = {**REQUEST, "job": {**REQUEST["job"], "row": row}}  # type: ignore[dict-item]
    return outbox_entry(
        job_id,
        request,
        "ok",
        attempt=1,
        completion={"choices": answers, "usage": usage},
        prompt_token_ids=[1, 2, 3],
        output_token_ids=[[5, 6]] * choices,
        token_logprobs=[[-0.25, -0.5]] * choices if logprobs else (),
        sampling={"temperature": 0.0, "top_p": 1.0, "max_tokens": 7},
        seed=17,
        enqueued_at=100.0,
        started_at=101.0,
        first_token_at=101.5,
        finished_at=103.5,
        worker="w1",
        host="h1",
        provenance=PROVENANCE,
    )


def error_entry(row: int = 5, job_id: str = "j2"):
    error = JobError("out_of_memory", "needs 9 GiB, 4 GiB are free").to_dict()
    request = {"model": "demo", "messages": [], "job": {"run": "r1", "row": row}}
    return outbox_entry(job_id, request, "error", attempt=3, error=error, finished_at=5.0)


# --- rows -----------------------------------------------------------------------------------------


def test_a_completion_gives_one_row_with_all_its_facts():
    (row,) = rows_of(ok_entry(logprobs=True))
    table = table_of([row])
    assert table.schema.equals(SCHEMA)
    read = table.to_pylist()[0]
    known = {
        "run_id": "r1",
        "job_id": "j1",
        "row_index": 4,
        "choice_index": 0,
        "status": "ok",
        "custom_id": "mine",
        "target": "5",
        "session": "s1",
        "tags": ["a", "b"],
        "text": "5.0",
        "finish_reason": "stop",
        "input_tokens": 9,
        "output_tokens": 2,
        "output_token_ids": [5, 6],
        "token_logprobs": [-0.25, -0.5],
        "logprob_sum": -0.75,
        "queue_s": 1.0,
        "ttft_s": 0.5,
        "tpot_s": 2.0,
        "duration_s": 2.5,
        "seed": 17,
        "temperature": 0.0,
        "max_tokens": 7,
        "stop": ["\n"],
        "model_revision": "abc",
        "model_fingerprint": "f00",
        "worker_id": "w1",
        "error_type": None,
    }
    assert {name: read[name] for name in known} == known
    assert read["messages"][1]["content"] == "2+3"
    assert read["messages"][2]["tool_calls"][0]["function"]["name"] == "add"
    assert [top["token"] for top in read["top_logprobs"][0]] == ["5", "6"]
    assert json.loads(read["sampling_extra"]) == {"logit_bias": {"5": 1.5}}
    assert json.loads(read["metadata"]) == {"source": "test"}
    assert read["enqueued_at"].timestamp() == 100.0


# Columns that scoring will write; all others must have a value for some job.
RESERVED_FOR_SCORING = (
    "sample_id",
    "dataset",
    "dataset_revision",
    "dataset_split",
    "is_greedy",
    "scored_bytes",
)


def test_every_column_is_written_or_reserved_for_scoring():
    answered = ok_entry(logprobs=True)
    answered["provenance"] = dict.fromkeys(ModelInfo.__dataclass_fields__, "x")
    answered["sampling"] = Sampling(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        n=1,
    ).to_dict()
    answered["request"] |= {"tools": [], "response_format": {"type": "json_object"}}
    completion: Any = answered["completion"]
    completion["usage"] |= {
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    completion["choices"][0]["message"] |= {"reasoning_content": "hm", "tool_calls": []}
    rows = [*rows_of(answered), *rows_of(error_entry())]
    assert {name for row in rows for name in row} <= set(SCHEMA.names)
    written = {name for row in rows for name, value in row.items() if value is not None}
    assert written.isdisjoint(RESERVED_FOR_SCORING)
    assert written | set(RESERVED_FOR_SCORING) == set(SCHEMA.names)


def test_n_choices_give_n_rows_with_distinct_keys():
    rows = rows_of(ok_entry(choices=3))
    assert [row["choice_index"] for row in rows] == [0, 1, 2]
    assert [row["text"] for row in rows] == ["5.0", "5.1", "5.2"]
    assert {row["output_tokens"] for row in rows} == {2}


def test_an_error_gives_exactly_one_row_with_its_code_and_message():
    (row,) = rows_of(error_entry())
    assert (row["status"], row["finish_reason"], row["choice_index"]) == ("error", "error", 0)
    assert (row["error_type"], row["error_retryable"]) == ("out_of_memory", True)
    assert row["error_message"] == "needs 9 GiB, 4 GiB are free"
    assert row["text"] is None


def test_a_cancelled_job_with_many_choices_gives_one_row_with_partial_text():
    entry = ok_entry(choices=3)
    entry["status"] = "cancelled"
    entry["error"] = JobError("cancelled", "stopped").to_dict()
    (row,) = rows_of(entry)
    assert (row["status"], row["finish_reason"], row["text"]) == ("cancelled", "cancelled", "5.0")


def test_jobs_without_a_row_get_a_stable_index_outside_the_given_range():
    keys = {row_index_of(f"job{i}", {}) for i in range(1000)}
    assert len(keys) == 1000
    assert min(keys) >= 2**62
    assert max(keys) < 2**63
    assert row_index_of("a", {}) == row_index_of("a", {"job": {"row": "x"}})
    assert row_index_of("a", {"job": {"row": 7}}) == 7


@pytest.mark.parametrize("run", ["../x", ".x", "a/b", "", 7, None, "x" * 101])
def test_a_run_is_always_a_plain_folder_name(run):
    assert run_of({"job": {"run": run}}) == DEFAULT_RUN


def test_the_request_hash_ignores_order_and_fields_that_do_not_affect_the_answer():
    first = rows_of(ok_entry(row=1))[0]["request_hash"]
    entry = ok_entry(row=2)
    entry["request"] = dict(reversed(entry["request"].items())) | {"user": "u"}
    assert rows_of(entry)[0]["request_hash"] == first
    entry["request"]["temperature"] = 1
    assert rows_of(entry)[0]["request_hash"] != first


def test_an_entry_with_a_lone_surrogate_survives_its_json():
    entry = error_entry()
    entry["request"]["messages"] = [{"role": "user", "content": "a\ud800b"}]
    again = decode(encode(entry).encode())
    assert again == entry
    assert table_of(rows_of(again)).to_pylist()[0]["messages"][0]["content"] == "a?b"


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=2**62, max_value=2**70)
    | st.floats()
    | st.text(alphabet=st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = sorted(
    {*REQUEST, "temperature", "top_k", "n", "seed", "tools", "stop_token_ids", "response_format"}
)


@settings(max_examples=300, deadline=None)
@given(
    request=st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, json_values)),
    overrides=st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(
            [
                "completion",
                "error",
                "sampling",
                "prompt_token_ids",
                "output_token_ids",
                "token_logprobs",
                "enqueued_at",
                "finished_at",
                "seed",
                "provenance",
            ],
            json_values,
        ),
    ),
)
def test_no_entry_can_stop_the_recorder(request, overrides):
    entry: Any = {**error_entry(), "request": request, **overrides}
    sink = pa.BufferOutputStream()
    table = table_of(rows_of(decode(encode(entry))))
    pq.write_table(table, sink)
    assert table.num_rows == 1


# --- files ----------------------------------------------------------------------------------------


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """A run of two parts: one of full rows, one of errors with most columns null."""
    run = tmp_path / "r1"
    full = [row for i in range(20) for row in rows_of(ok_entry(i, f"a{i}", 2, logprobs=True))]
    write_part(run / "_tmp/a.parquet", run / "samples/part-a.parquet", table_of(full))
    bare = [row for i in range(20, 25) for row in rows_of(error_entry(i, f"b{i}"))]
    write_part(run / "_tmp/b.parquet", run / "samples/part-b.parquet", table_of(bare))
    write_run_card(run, {"run": "r1", "state": "finished"})
    return Results(tmp_path)


def glob_of(results: Results) -> str:
    return str(results.path("r1") / "samples" / "*.parquet")


def test_results_reads_the_run_as_a_table(results):
    table = results.table("r1")
    assert table.num_rows == 45
    assert table.schema.equals(SCHEMA)
    keys = set(
        zip(*(table[name].to_pylist() for name in ("row_index", "choice_index")), strict=True)
    )
    assert len(keys) == 45
    assert results.table(run="r1", columns=["text", "status"]).column_names == ["text", "status"]
    errors = results.dataset("r1").to_table(filter=ds.field("status") == "error")
    assert errors.num_rows == 5


def test_duckdb_reads_it(results):
    parts = glob_of(results)
    sums = duckdb.sql(
        f"select status, count(*), sum(len(token_logprobs)), max(messages[2].content), "
        f"max(top_logprobs[1][2].token), max(epoch(finished_at)) from '{parts}' "
        "group by 1 order by 1"
    ).fetchall()
    assert sums == [("error", 5, None, None, None, 5.0), ("ok", 40, 80, "2+3", "6", 103.5)]
    keys = duckdb.sql(f"select count(distinct (run_id, row_index, choice_index)) from '{parts}'")
    assert keys.fetchall() == [(45,)]
    metadata = duckdb.sql(f"select key, value from parquet_kv_metadata('{parts}')").fetchall()
    assert (b"chatjobs.schema_version", b"1") in metadata


def test_polars_reads_it(results):
    for source in (glob_of(results), str(results.path("r1") / "samples")):
        frame = pl.read_parquet(source)
        assert frame.height == 45
        assert frame.schema["token_logprobs"] == pl.List(pl.Float32)
        assert frame.filter(pl.col("status") == "ok")["messages"][0][1]["content"] == "2+3"


def test_pandas_reads_it(results):
    frame = pd.read_parquet(results.path("r1") / "samples")
    assert len(frame) == 45
    assert frame["queue_s"].notna().sum() == 40
    assert str(frame["finished_at"].dt.tz) == "UTC"
    assert frame.iloc[0]["messages"][1]["content"] == "2+3"


def test_hugging_face_reads_the_run_folder(results, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    data = datasets.load_dataset(str(results.path("r1")), split="train", cache_dir=tmp_path / "hf")
    assert len(data) == 45
    ok = next(row for row in data if row["status"] == "ok")
    assert ok["messages"][1]["content"] == "2+3"
    assert ok["token_logprobs"] == [-0.25, -0.5]
    assert ok["top_logprobs"][0][1]["token"] == "6"


def test_every_field_has_a_description_also_in_the_file(results):
    stored = pq.read_schema(results.path("r1") / "samples" / "part-a.parquet")
    assert stored.equals(SCHEMA)
    for field in stored:
        assert len(field.metadata[b"description"]) > 3, field.name


def test_no_column_has_a_type_that_some_reader_cannot_read():
    allowed = {"string", "bool", "timestamp[us, tz=UTC]", "float", "double"}
    allowed |= {"int16", "int32", "int64"}
    assert {str(kind) for kind in leaves().values()} <= allowed


def test_floats_are_byte_stream_split_and_the_rest_dictionary_encoded(results):
    file = pq.ParquetFile(results.path("r1") / "samples" / "part-a.parquet")
    group = file.metadata.row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert columns.keys() == leaves().keys()
    floats = columns["token_logprobs.list.element"]
    assert "BYTE_STREAM_SPLIT" in floats.encodings
    assert "RLE_DICTIONARY" not in floats.encodings
    assert "RLE_DICTIONARY" in columns["model_fingerprint"].encodings
    assert floats.compression == "ZSTD"
    assert floats.has_offset_index


def test_the_same_entries_make_the_same_file(tmp_path):
    for name in ("a", "b"):
        table = table_of(rows_of(ok_entry(logprobs=True)))
        write_part(tmp_path / "_tmp/x", tmp_path / name, table)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_reader_sees_only_complete_files_while_parts_are_written(tmp_path):
    run = tmp_path / "r1"
    table = table_of([row for i in range(200) for row in rows_of(ok_entry(i, f"a{i}"))])
    write_part(run / "_tmp/0", run / "samples/part-0.parquet", table)
    seen, stop = [], threading.Event()

    def read():
        while not stop.is_set():
            seen.append(ds.dataset(run / "samples").count_rows())

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(1, 12):
        write_part(run / f"_tmp/{number}", run / f"samples/part-{number}.parquet", table)
    stop.set()
    reader.join()
    assert seen
    assert {count % 200 for count in seen} == {0}
    assert os.listdir(run / "_tmp") == []


def test_a_crash_before_the_rename_leaves_no_file_in_samples(tmp_path, monkeypatch):
    run = tmp_path / "r1"
    write_part(run / "_tmp/0", run / "samples/part-0.parquet", table_of(rows_of(ok_entry())))

    def crash(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        write_part(run / "_tmp/1", run / "samples/part-1.parquet", table_of(rows_of(ok_entry())))
    assert os.listdir(run / "samples") == ["part-0.parquet"]
    assert Results(tmp_path).table("r1").num_rows == 1


def test_an_unknown_run_is_refused_with_the_names_of_the_runs(results, tmp_path):
    with pytest.raises(InvalidRequest, match=r"no run 'nope' in .*; runs there: r1"):
        results.table("nope")
    with pytest.raises(ValueError, match="runs there: none"):
        Results(tmp_path / "nothing").path("r1")
    with pytest.raises(InvalidRequest):
        results.path("../r1")


def test_an_unknown_column_is_refused_with_the_names_of_the_columns(results):
    with pytest.raises(InvalidRequest, match="no column 'answer' in results; columns are: "):
        results.table("r1", columns=["answer"])


def test_a_run_without_rows_is_an_empty_table(tmp_path):
    write_run_card(tmp_path / "new", {"state": "running"})
    results = Results(tmp_path)
    assert results.runs() == ["new"]
    assert results.table("new").num_rows == 0
    assert results.table("new").schema.equals(SCHEMA)
    assert results.config("new") == {"state": "running"}


def test_infinite_and_missing_logprobs_are_kept(tmp_path):
    entry = ok_entry(logprobs=True)
    entry["token_logprobs"] = [[-math.inf, -0.5]]
    table = table_of(rows_of(decode(encode(entry))))
    write_part(tmp_path / "_tmp/x", tmp_path / "x.parquet", table)
    read = pq.read_table(tmp_path / "x.parquet")
    assert read["token_logprobs"].to_pylist() == [[-math.inf, -0.5]]
