"""`chatjobs chat --local`: a model in the process of the command; no Redis is reachable."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type

from jobs.cli.dialogue import Stopped
from tests.cli.conftest import COMMAND, Run
from tests.cli.terminal import Terminal
from tests.worker.gguf.blocks import make_type_file, make_wide
from worker import Engine
from worker.chat.assembly import ChoiceState
from worker.cli.local import LocalModel
from worker.demo import MODEL_DIR
from worker.engine.sequence import TokenEvent

GREEDY = ("-o", "temperature=0")
LOCAL = ("chat", "--local", "--model", "demo", *GREEDY)
CONTEXT = 65536


def test_a_question_is_answered_without_redis(run: Run) -> None:
    done = run(*LOCAL, "What is 17 + 25?")
    assert done.exit_code == 0
    assert done.stdout == "42\n"
    assert "loading demo" in done.stderr


def test_stdin_is_the_question(run: Run) -> None:
    assert run(*LOCAL, "--quiet", "-", input="What is 2 + 3?").output == "5\n"


def test_json_has_the_chunks_and_then_the_completion(run: Run) -> None:
    done = run(*LOCAL, "--json", "What is 2 + 3?")
    *chunks, completion = [json.loads(line) for line in done.stdout.splitlines()]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert completion["object"] == "chat.completion"
    assert completion["choices"][0]["message"]["content"] == "5"


def test_all_choices_are_printed(run: Run) -> None:
    done = run(*LOCAL, "-o", "n=2", "What is 2 + 3?")
    assert done.stdout == "choice 1 of 2:\n5\n\nchoice 2 of 2:\n5\n"


def test_a_slow_way_of_computing_is_said(tmp_path: Path) -> None:
    file = make_type_file(make_wide(tmp_path / "wide"), tmp_path / "it.gguf", Type.IQ3_S)
    command = ("chat", "--local", "--keep-quantised", "--model", str(file), "-o", "max_tokens=1")
    done = subprocess.run([COMMAND, *command, "a"], capture_output=True, text=True, check=False)
    assert f"{file}: slow, because weights in IQ3_S are dequantised" in done.stderr


def test_a_wrong_field_is_refused_before_the_model_is_loaded(run: Run) -> None:
    done = run("chat", "--local", "--model", "/no/such/model", "-o", "top_p=2", "Hi")
    assert done.exit_code == 2
    assert "top_p" in done.output
    assert "loading" not in done.output


def test_a_model_that_is_not_there_is_one_sentence(run: Run) -> None:
    done = run("chat", "--local", "--quiet", "--model", "/no/such/model", "Hi")
    assert done.exit_code == 3
    assert done.output.count("\n") == 1
    assert "/no/such/model" in done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--local", "--redis", "redis://localhost"), "--redis is for a worker's answers"),
        (("--local", "--wait", "3"), "--wait is for a worker's answers"),
        (("--local", "--timeout", "3"), "--timeout is for a worker's answers"),
        (("--chat-template", __file__), "--chat-template needs --local"),
        (("--keep-quantised",), "--keep-quantised needs --local"),
        (("--add-bos",), "--add-bos needs --local; for workers give it to chatjobs work"),
        (("--no-add-bos",), "--no-add-bos needs --local; for workers give it to chatjobs work"),
    ],
)
def test_options_of_the_other_way_are_refused(
    run: Run, options: tuple[str, ...], message: str
) -> None:
    done = run("chat", "--model", "demo", *options, "Hi")
    assert done.exit_code == 2
    assert message in done.output


def test_a_chat_template_replaces_that_of_the_model(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{{ raise_exception('mine') }}")
    done = run("chat", "--local", "--quiet", "--model", "demo", "--chat-template", str(path), "Hi")
    assert done.exit_code == 2
    assert "mine" in done.output


def test_a_conversation_keeps_its_turns_in_memory(opened: list[Terminal], tmp_path: Path) -> None:
    opened.append(Terminal(*LOCAL))
    (terminal,) = opened
    terminal.expect("/help lists the commands")
    terminal.type("What is 2 + 3?\r")
    terminal.expect("\n5")
    terminal.type("What is 17 + 25?\r")
    terminal.expect("\n42")
    terminal.type("/stats\r")
    terminal.expect("model demo, 2 turns")
    terminal.expect("all: 2 answers")
    terminal.type("/undo\r")
    terminal.expect("removed: What is 17 + 25?")
    path = tmp_path / "chat.json"
    terminal.type(f"/save {path}\r")
    terminal.expect("1 turn written")
    terminal.type("/reset\r")
    terminal.expect("begins again")
    terminal.type(f"/load {path}\r")
    terminal.expect("1 turn read")
    terminal.type("/system Be brief.\r")
    terminal.expect("the system message is set")
    terminal.type("/history\r")
    terminal.expect("system: Be brief.")
    terminal.expect("assistant: 5")
    terminal.type("\x04")
    assert terminal.wait() == 0


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes while the third events of an answer are assembled."""
    runs, calls = ChoiceState.runs, count(1)

    def interrupted(self: ChoiceState, events: list[TokenEvent]) -> Iterator[Any]:
        if next(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return runs(self, events)

    monkeypatch.setattr(ChoiceState, "runs", interrupted)


@pytest.mark.usefixtures("interrupted")
def test_ctrl_c_leaves_no_answer_half_assembled(caplog: pytest.LogCaptureFixture) -> None:
    fields = {"temperature": 0, "ignore_eos": True, "max_tokens": 400}
    model = LocalModel(Engine.load("demo", device="cpu"))
    dialogue = model.dialogue(None, fields)
    with pytest.raises(Stopped):
        dialogue.ask("What is 2 + 3?")
    _, (turn,) = dialogue.read()
    assert turn.finish_reason == "cancelled"
    assert turn.answer["reasoning_content"].startswith("2")
    assert not caplog.records
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interrupted")
def test_ctrl_c_ends_a_single_question(run: Run) -> None:
    done = run(*LOCAL, "-o", "ignore_eos=true", "-o", "max_tokens=400", "What is 2 + 3?")
    assert done.exit_code == 130
    assert done.stderr.splitlines()[-1].endswith("interrupted")
    assert "error" not in done.stderr


def long_demo(folder: Path) -> Path:
    """The demo model with a context that an answer fills in minutes: a busy machine has the time to
    interrupt it."""
    path = Path(shutil.copytree(MODEL_DIR, folder / "demo"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return path


def test_ctrl_c_stops_the_answer_and_keeps_it(opened: list[Terminal], tmp_path: Path) -> None:
    words = ("chat", "--local", "--model", str(long_demo(tmp_path)), *GREEDY)
    long = ("-o", "ignore_eos=true", "-o", f"max_tokens={CONTEXT // 2}")
    opened.append(Terminal(*words, *long))
    (terminal,) = opened
    terminal.expect("/help lists the commands")
    terminal.type("What is 2 + 3?\r")
    terminal.expect("\n5")
    terminal.interrupt()
    terminal.expect("(stopped)")
    path = tmp_path / "chat.json"
    terminal.type(f"/save {path}\r")
    terminal.expect("1 turn written")
    (turn,) = json.loads(path.read_text())["turns"]
    assert turn["finish_reason"] == "cancelled"
    assert turn["answer"]["content"].startswith("5")
    terminal.type("/reset\r")  # how far the answer got decides how the model goes on
    terminal.expect("begins again")
    terminal.type("What is 17 + 25?\r")
    terminal.expect("42")
    terminal.interrupt()
    terminal.expect("(stopped)")
    terminal.type("/quit\r")
    assert terminal.wait() == 0
