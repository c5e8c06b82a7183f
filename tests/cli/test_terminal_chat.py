"""`chatjobs chat` without a question: a conversation, in a real terminal."""

from __future__ import annotations

import json
import os
from pathlib import Path

from jobs import ChatRequest
from jobs.store.worker_status import read_workers
from tests.cli.conftest import Run
from tests.cli.terminal import Terminal
from tests.worker.fake_backend import text_of
from tests.worker.site import PATIENCE, Site, wait_until


def answer_to(content: str, words: int = 5) -> str:
    messages = [{"role": "user", "content": content}]
    return text_of(
        ChatRequest(model="fake", messages=messages, metadata={"words": str(words)})
    ).strip()


def start(site: Site, opened: list[Terminal], *words: str) -> Terminal:
    patient = ("--wait", str(PATIENCE))
    opened.append(Terminal("chat", "--model", "fake", "--redis", site.url, *patient, *words))
    opened[-1].expect("/help")
    return opened[-1]


def test_a_conversation_with_its_commands(
    site: Site, opened: list[Terminal], tmp_path: Path
) -> None:
    worker = site.worker()
    terminal = start(site, opened, "--system", "Be brief.")
    terminal.type("one\r")
    terminal.expect(answer_to("one"))
    terminal.type("two\x1b\rsecond line\r")  # Alt-Enter begins a new line
    terminal.expect(answer_to("two\nsecond line"))
    terminal.type("/stats\r")
    terminal.expect("model fake, 2 turns")
    terminal.expect("all: 2 answers, 2 tokens in, 10 out")
    terminal.type("/system Be long.\r")
    terminal.expect("the system message is set")
    path = tmp_path / "chat.json"
    terminal.type(f"/save {path}\r")
    terminal.expect("2 turns written")
    saved = json.loads(path.read_text())
    assert (saved["system"], saved["model"], len(saved["turns"])) == ("Be long.", "fake", 2)
    terminal.type("/undo\r")
    terminal.expect("removed: two")
    terminal.type("/history\r")
    terminal.expect("system: Be long.")
    terminal.expect("user: one")
    terminal.expect(f"assistant: {answer_to('one')}")
    terminal.type("/reset\r")
    terminal.expect("begins again")
    terminal.type(f"/load {path}\r")
    terminal.expect("2 turns read")
    terminal.type("/load /no/such/file\r")
    terminal.expect("/no/such/file: there is no such file")
    terminal.type("\x03")  # at the prompt it only clears the line
    terminal.expect("(Ctrl-D ends)")
    terminal.type("three\r")
    terminal.expect(answer_to("three"))
    terminal.type("\x04")
    assert terminal.wait() == 0
    assert not list(site.redis.scan_iter("chatjobs:*:session"))
    assert worker.stop() == 0


def test_a_file_is_not_overwritten_unasked(
    site: Site, opened: list[Terminal], tmp_path: Path
) -> None:
    path = tmp_path / "chat.json"
    path.write_text("mine")
    terminal = start(site, opened)
    terminal.type(f"/save {path}\r")
    terminal.expect(f"{path} exists: /save --force {path} overwrites it")
    assert path.read_text() == "mine"
    terminal.type(f"/save --force {path}\r")
    terminal.expect("0 turns written")
    assert json.loads(path.read_text())["turns"] == []
    terminal.type(f"/save {path}\r")  # this conversation has written it
    terminal.expect("0 turns written")
    for name, reason in (
        (f"{tmp_path}/absent/c.json", "can't be written: No such file or directory"),
        (str(tmp_path), "can't be written: it is no regular file"),
    ):
        terminal.type(f"/save {name}\r")
        assert "Errno" not in terminal.expect(f"{name} {reason}")
    terminal.type("/exit\r")
    assert terminal.wait() == 0


def test_words_that_end_are_told_and_others_are_corrected(
    site: Site, opened: list[Terminal]
) -> None:
    opened.append(Terminal("chat", "--model", "fake", "--redis", site.url))
    terminal = opened[-1]
    terminal.expect("/help lists the commands, /quit or Ctrl-D ends.")
    terminal.type("/histroy\r")
    terminal.expect("there is no command /histroy: did you mean /history?")
    terminal.type("/nope\r")
    terminal.expect("there is no command /nope: the commands are /system, ")
    terminal.type("/help\r")
    terminal.expect("/quit, /exit")
    terminal.type("/quit\r")
    assert terminal.wait() == 0
    assert not list(site.redis.scan_iter("chatjobs:*:session"))


def test_ctrl_c_stops_the_answer_and_keeps_it(
    site: Site, opened: list[Terminal], tmp_path: Path
) -> None:
    worker = site.worker(delay=0.02)
    terminal = start(site, opened, "-o", 'metadata={"words": "3000"}')
    terminal.type("long\r")
    terminal.expect(answer_to("long", 8))
    terminal.interrupt()
    terminal.expect("(stopped)")
    path = tmp_path / "chat.json"
    terminal.type(f"/save {path}\r")
    terminal.expect("1 turn written")
    (turn,) = json.loads(path.read_text())["turns"]
    assert turn["finish_reason"] == "cancelled"
    assert turn["answer"]["content"].startswith(answer_to("long", 8))
    terminal.type("\x04")
    assert terminal.wait() == 0
    worker.kill()


def test_ctrl_c_while_a_question_is_submitted_leaves_no_job(
    site: Site, opened: list[Terminal], tmp_path: Path
) -> None:
    worker = site.worker(delay=0.02)
    terminal = start(site, opened, "-o", 'metadata={"words": "3000"}')
    terminal.type("first\r")  # now Redis knows the scripts, and runs them when it goes on
    terminal.expect(answer_to("first", 8))
    terminal.interrupt()
    terminal.expect("(stopped)")
    with site.paused_server():
        terminal.type_and_wait("long\r")
        terminal.interrupt()
    terminal.expect("(stopped)")
    wait_until(lambda: [one["running"] for one in read_workers(site.redis)] == [0])
    terminal.type("/reset\r")  # refused while a job runs
    terminal.expect("begins again")
    terminal.type("\x04")
    assert terminal.wait() == 0
    worker.kill()


def test_ctrl_c_again_leaves_no_job(site: Site, opened: list[Terminal]) -> None:
    worker = site.worker(delay=0.02)
    terminal = start(site, opened, "-o", 'metadata={"words": "3000"}')
    terminal.type("first\r")  # now Redis knows the scripts, and runs them when it goes on
    terminal.expect(answer_to("first", 8))
    terminal.interrupt()
    terminal.expect("(stopped)")
    with site.paused_server():
        terminal.type_and_wait("long\r")
        terminal.interrupt()  # the submit
        terminal.wait_until_blocked()
        terminal.interrupt()  # the cancel
        terminal.expect("(Ctrl-D ends)")
    wait_until(lambda: len(list(site.redis.scan_iter("rq:job:*"))) == 2)
    terminal.type("/reset\r")  # refused while a job runs
    terminal.expect("begins again")
    terminal.type("\x04")
    assert terminal.wait() == 0
    worker.kill()


def test_what_is_no_text_no_file_and_no_user_is_told(
    site: Site, opened: list[Terminal], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    terminal = start(site, opened)
    for line, answer in (
        ("/system \udcff", "is a lone surrogate"),
        ("/load ~nobody-has-this-name/x", "there is no such user"),
        (f"/load {tmp_path / 'absent'}", "there is no such file"),
        (f"/load {'x' * 300}", "there is no such file"),
        (f"/save {'x' * 300}", "File name too long"),
        (f"/save --force {tmp_path / 'pipe'}", "it is no regular file"),
    ):
        terminal.type(f"{line}\r")
        terminal.expect(answer)
    terminal.type("\x04")
    assert terminal.wait() == 0


def test_without_a_worker_the_conversation_says_so_and_goes_on(
    site: Site, opened: list[Terminal]
) -> None:
    terminal = start(site, opened, "--wait", "0.2")
    terminal.type("one\r")
    terminal.expect("wait longer for one")
    worker = site.worker(lease_seconds=60.0)
    wait_until(lambda: any("fake" in one["names"] for one in read_workers(site.redis)))
    terminal.type("two\r")
    terminal.expect(answer_to("two"))
    terminal.type("\x04")
    assert terminal.wait() == 0
    assert worker.stop() == 0


def test_a_missing_question_without_a_terminal_is_wrong_usage(run: Run) -> None:
    done = run("chat", "--model", "fake")
    assert done.exit_code == 2
    assert "the question is missing: give TEXT" in done.output


def test_a_wrong_field_of_a_conversation_is_wrong_usage(site: Site, opened: list[Terminal]) -> None:
    opened.append(Terminal("chat", "--model", "fake", "--redis", site.url, "-o", "n=2"))
    opened[-1].expect("a turn of a conversation has one answer")
    assert opened[-1].wait() == 2
