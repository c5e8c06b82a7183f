"""Batches of rows → results, without Ray: `make extras` has the tests with it."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from jobs import ChatRequest, JobError
from jobs.data_sets.data_set import sample_seed
from jobs.results.schema import SCHEMA
from tests.waiting import wait_until
from tests.worker.fake_backend import FakeBackend
from worker import Engine
from worker.model_spec import ModelSpec
from worker.ray_data import EnginePredictor, predictor
from worker.ray_data import predict as predict_data_set

Predict = Callable[..., pa.Table]
Make = Callable[..., EnginePredictor]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def make() -> Iterator[Make]:
    """Predictors of the demo model, one for all tests that give the same arguments."""
    made: dict[str, EnginePredictor] = {}

    def get(**arguments: Any) -> EnginePredictor:
        name = repr(arguments)
        if name not in made:
            made[name] = EnginePredictor("demo", **arguments)
        return made[name]

    yield get
    for one in made.values():
        one.close()


@pytest.fixture(scope="module")
def predict(make: Make) -> Predict:
    """`predict({"prompt": […]}, mode="chat")`: the results of one batch."""

    def call(batch: Any, /, **arguments: Any) -> pa.Table:
        table = batch if isinstance(batch, pa.Table) else pa.table(batch)
        return asyncio.run(make(**arguments)(table))

    return call


def test_results_are_rows_of_a_run_beside_the_columns_of_the_data_set(predict: Predict) -> None:
    questions = ["What is 2 + 3?", "What is 17 + 25?", "What is 9 + 1?"]
    image = pa.array([b"\0", None, b"\2"], pa.large_binary())
    found = predict(
        {"id": ["a", "b", "c"], "question": questions, "answer": [5, 42, 10], "image": image},
        options=GREEDY,
    )
    assert found.schema.names == ["id", "question", "answer", "image", *SCHEMA.names]
    assert found.schema.field("image").type == pa.large_binary()
    assert found.select(SCHEMA.names).schema.equals(SCHEMA)
    rows = found.to_pylist()
    engine = Engine.load("demo")
    for question, row in zip(questions, rows, strict=True):
        request = ChatRequest(
            model="demo", messages=[{"role": "user", "content": question}], **GREEDY
        )
        answer = engine.chat(request).choices[0]
        assert (row["question"], row["text"]) == (question, answer.message.content)
        assert (row["finish_reason"], row["status"]) == (answer.finish_reason, "ok")
    engine.close()
    assert [row["target"] for row in rows] == ["5", "42", "10"]
    assert [row["id"] for row in rows] == ["a", "b", "c"]
    assert {row["run_id"] for row in rows} == {"ray"}
    assert len({row["row_index"] for row in rows}) == 3
    assert rows[0]["model_fingerprint"] and rows[0]["output_tokens"] and rows[0]["duration_s"]


def test_a_bad_row_is_a_row_with_an_error(predict: Predict) -> None:
    template = "{{ question }}{{ 'word ' * many }}{{ 1 / divisor }}"
    rows = predict(
        {
            "question": ["2 + 3? ", "2 + 3? ", "2 + 3? ", "2 + 3? ", None],
            "many": [0, 5000, 0, 0, 0],
            "divisor": [1.0, 1.0, 0.0, 1.0, 1.0],
            "row_index": [0, 1, 2, -3, 4],
            "custom_id": ["a", "b", "c", "d", "e"],
        },
        template=template,
        options=GREEDY,
    ).to_pylist()
    assert [row["error_type"] for row in rows] == [
        None,
        "context_length_exceeded",
        *["invalid_request"] * 3,
    ]
    assert "fails on these columns: float division by zero" in rows[2]["error_message"]
    assert rows[3]["error_message"] == "row_index: must be an integer from 0, got -3"
    assert "'question' is undefined" in rows[4]["error_message"]
    assert [row["custom_id"] for row in rows] == ["a", "b", "c", "d", "e"]
    assert [row["row_index"] for row in (rows[0], *rows[1:3], rows[4])] == [0, 1, 2, 4]
    assert rows[0]["messages"][0]["content"] == "2 + 3? 1.0"
    assert (rows[2]["model"], rows[2]["attempt"], rows[2]["text"]) == ("demo", 0, None)


def test_rows_without_a_prompt_name_the_argument_that_gives_one(predict: Predict) -> None:
    rows = predict({"qestion": ["2 + 3?"], "n": [1]}, options=GREEDY).to_pylist()
    assert rows[0]["error_message"].startswith("a row needs messages, prompt or text")
    (empty,) = predict({"prompt": pa.array([None], pa.string())}, options=GREEDY).to_pylist()
    assert "column 'prompt' is empty" in empty["error_message"]
    (scored,) = predict({"question": ["2?"]}, mode="loglikelihood").to_pylist()
    assert "a row of mode='loglikelihood' needs continuations" in scored["error_message"]
    assert "columns={'COLUMN': 'continuations'}" in scored["error_message"]
    assert (scored["operation"], scored["status"]) == ("loglikelihood", "error")


def test_each_mode_scores_as_a_run_does(predict: Predict) -> None:
    # In bf16 a score depends on how many tokens its step has.
    engine = Engine.load("demo", dtype="fp32")
    exact = partial(predict, engine_kwargs={"dtype": "fp32"})
    texts = ("What is 2 + 3?", " 5", " 17")
    prompt, *given = (engine.tokenizer.encode(text, add_special_tokens=False) for text in texts)
    expected = [math.fsum(engine.score(prompt, one)) for one in given]
    engine.close()
    found = exact(
        {"id": [7, 8], "question": [texts[0]] * 2, "continuations": [["5", "17"], ["5"]]},
        mode="loglikelihood",
    ).to_pylist()
    assert [(row["id"], row["choice_index"]) for row in found] == [(7, 0), (7, 1), (8, 0)]
    scores = [row["logprob_sum"] for row in found]
    assert scores == pytest.approx([*expected, expected[0]], abs=1e-3)
    picked = exact(
        {"question": [texts[0]], "choices": [["5", "17"]], "answer": ["A"]}, mode="choice"
    ).to_pylist()
    assert [row["text"] for row in picked] == [texts[1 + expected.index(max(expected))]]
    assert picked[0]["target"] == "5" and len(picked[0]["choices"]) == 2
    (text,) = exact({"text": ["2 + 3 = 5"]}, mode="perplexity").to_pylist()
    assert text["scored_tokens"] == text["input_tokens"] > 3 and text["prompt"] == "2 + 3 = 5"
    (raw,) = exact({"prompt": ["2 + 3 ="]}, mode="completion", options=GREEDY).to_pylist()
    assert (raw["prompt"], raw["messages"], raw["status"]) == ("2 + 3 =", None, "ok")


def test_a_seed_gives_each_row_one_whatever_its_batch(predict: Predict) -> None:
    options = {"temperature": 1.5, "max_tokens": 8}
    table = pa.table({"prompt": ["2 + 3?"] * 4, "custom_id": list("abcd")})
    first = predict(table, seed=7, options=options)
    again = predict(table.take([3, 1]), seed=7, options=options)
    seeds = first["seed"].to_pylist()
    assert len(set(seeds)) == 4 and again["seed"].to_pylist() == [seeds[3], seeds[1]]
    assert again["row_index"].to_pylist() == first["row_index"].take([3, 1]).to_pylist()
    numbered = predict(
        {"prompt": ["2 + 3?"], "number": [5]},
        seed=7,
        columns={"number": "row_index"},
        options=options,
    )
    assert numbered["seed"].to_pylist() == [sample_seed(7, 5, 0)]
    assert numbered["row_index"].to_pylist() == [5]


def test_values_of_ray_and_of_arrow_are_those_of_json(predict: Predict) -> None:
    message = {"role": "user", "content": "2 + 3?"}
    odd = [{**message, "name": None}, {**message, "name": "Ann"}]
    found = predict({"messages": [odd[:1], odd[1:]]}, options=GREEDY).to_pylist()
    assert [row["status"] for row in found] == ["ok", "ok"]
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.array([[5, 6, 7], [7, 8, 9]]))
    scored = predict(
        {"prompt": tensors, "continuations": [["5"], ["6"]]}, mode="loglikelihood"
    ).to_pylist()
    assert [row["prompt_token_ids"] for row in scored] == [[5, 6, 7], [7, 8, 9]]


def test_overlapping_batches_have_their_own_rows(make: Make) -> None:
    async def both() -> list[pa.Table]:
        batches = [pa.table({"prompt": prompts}) for prompts in (one, two)]
        return await asyncio.gather(*map(make(options=GREEDY), batches))

    one, two = ([f"What is {n} + {n}?" for n in numbers] for numbers in (range(3), range(3, 7)))
    found = asyncio.run(both())
    asked = [[row["messages"][0]["content"] for row in table.to_pylist()] for table in found]
    assert asked == [one, two]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"mode": "chats"}, "mode: must be one of chat, completion, loglikelihood, choice"),
        ({"options": {"temprature": 1}}, "temprature"),
        ({"options": {"max_tokens": "9"}}, "options['max_tokens']: "),
        ({"options": {"model": "x"}}, "options: model is set by the rows and the other arguments"),
        ({"columns": {"q": "promt"}}, "columns['q']: unknown field 'promt'; did you mean 'prompt'"),
        ({"template": "{{ a"}, "is not valid Jinja"),
        ({"run": "a/b"}, "run: 'a/b' is not a name that a run can have"),
        ({"seed": 1.5}, "seed: must be an integer, got 1.5"),
        ({"engine_kwargs": {"dtyp": "fp32"}}, "unknown argument 'dtyp'; did you mean 'dtype'?"),
        ({"engine_kwargs": {"cache_bytes": "9"}}, "cache_bytes must be a number of bytes"),
        ({"model": "/nowhere"}, "model_not_found: no folder '/nowhere': give a model folder"),
    ],
)
def test_what_no_row_can_be_answered_with_is_one_sentence(arguments: Any, sentence: str) -> None:
    made = EnginePredictor(**{"model": "demo", **arguments})  # as Ray makes it: never raises
    with pytest.raises(JobError) as caught:
        asyncio.run(made(pa.table({"prompt": ["?"]})))
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_columns_that_results_would_hide_are_refused(predict: Predict) -> None:
    with pytest.raises(JobError, match=r"rename_columns\({'status': 'my_status'}\)"):
        predict({"prompt": ["?"], "status": ["new"]}, options=GREEDY)
    with pytest.raises(JobError, match="columns 'q' and 'prompt' both hold prompt"):
        predict({"q": ["?"], "prompt": ["?"]}, columns={"q": "prompt"})


def test_batches_of_another_format_are_refused(make: Make) -> None:
    with pytest.raises(JobError, match='give map_batches batch_format="pyarrow"'):
        asyncio.run(make(options=GREEDY)({"prompt": np.array(["?"])}))


def test_weights_are_downloaded_only_if_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Remote:
        needs_download = True

    monkeypatch.setattr("worker.loading.find.find", lambda *_: Remote())
    made = EnginePredictor("org/name")
    with pytest.raises(JobError, match="org/name is not on this node: run chatjobs models pull"):
        asyncio.run(made(pa.table({"prompt": ["?"]})))


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    """The backend of predictors that are made in the test."""
    backend = FakeBackend(delay=0.01)
    loaded = backend, backend.load(ModelSpec(reference="demo"))
    monkeypatch.setattr(predictor, "load", lambda *_, **__: loaded)
    return backend


def test_a_batch_that_nobody_waits_for_leaves_the_engine(backend: FakeBackend) -> None:
    made = EnginePredictor("demo")
    table = pa.table({"prompt": ["?"] * 3, "metadata": [{"words": "1000000"}] * 3})
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(made(table), 0.1))
    wait_until(lambda: not backend.health().running)
    made.close()


def test_a_dead_engine_ends_the_process(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Exited(Exception):
        pass

    def leave(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr("os._exit", leave)
    made = EnginePredictor("demo")
    table = pa.table({"prompt": ["?"], "metadata": [{"die": "1"}]})
    with pytest.raises(Exited, match="70"):
        asyncio.run(made(table))
    made.close()


def test_without_ray_the_driver_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(JobError, match=r"Ray Data is not installed: pip install .*\[ray\]"):
        predict_data_set(None, "demo")


def test_the_driver_imports_neither_ray_nor_torch() -> None:
    code = "import sys, worker.ray_data; print({'ray', 'torch'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr
