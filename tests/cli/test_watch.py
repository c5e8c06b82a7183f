"""`chatjobs status --watch` on a terminal whose size changes, and in a pipe, while Redis hangs, is
restarted empty, or refuses: it says so in one line, and goes on by itself."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len

from tests.cli.conftest import COMMAND, Spawn
from tests.cli.terminal import CONTROL, Terminal
from tests.servers import BINARIES, Server
from tests.waiting import PATIENCE, wait_until

CLEARED = "\x1b[H\x1b[2J"
FAILS = re.compile(
    r"\d\d:\d\d:\d\d\nerror: (?P<why>[^\n]+); since \d\d:\d\d:\d\d \(\d+ (s|min)\), trying again "
    r"every 0.1 s"
)
FAR = 20  # lines of a queue that no screen here has


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(BINARIES[0], tmp_path / "redis").start()
    yield server
    server.kill()


@pytest.fixture
def terminal(server: Server) -> Iterator[Terminal]:
    terminal = Terminal(*words(server), size=(120, 30))
    wait_until(lambda: "no queues" in view(terminal))
    yield terminal
    terminal.close()


def words(server: Server, login: str = "") -> list[str]:
    url = server.url.replace("redis://", f"redis://{login}") + "?socket_timeout=1"
    return ["status", "--watch", "--interval", "0.1", "--redis", url]


def view(terminal: Terminal) -> str:
    """What it shows: the last view that is whole."""
    looks = terminal.text.split(CLEARED)
    return CONTROL.sub("", looks[-2] if len(looks) > 1 else "").replace("\r\n", "\n")


def fails(terminal: Terminal, why: str) -> bool:
    """Whether the terminal shows one line with the reason, and nothing else."""
    found = FAILS.fullmatch(view(terminal).strip())
    return found is not None and why in found["why"]


def goes_on(terminal: Terminal) -> bool:
    return "no queues" in view(terminal) and "error" not in view(terminal)


def test_a_server_that_hangs_or_is_restarted_empty_is_a_line_until_it_answers(
    server: Server, terminal: Terminal
) -> None:
    server.send(signal.SIGSTOP)
    wait_until(lambda: fails(terminal, "Timeout"), view(terminal))
    server.send(signal.SIGCONT)
    wait_until(lambda: goes_on(terminal))
    server.client.rpush("rq:queue:chat:m", "job")
    server.client.sadd("rq:queues", "rq:queue:chat:m")
    wait_until(lambda: "chat:m" in view(terminal))
    server.kill()
    wait_until(lambda: fails(terminal, "Connection refused"), view(terminal))
    server.start()
    wait_until(lambda: goes_on(terminal))
    assert "Traceback" not in terminal.text


def test_a_password_that_was_changed_is_a_line_until_it_fits(
    server: Server, terminal: Terminal
) -> None:
    admin = server.client
    admin.config_set("requirepass", "other")
    admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    wait_until(lambda: fails(terminal, "refused the login"), view(terminal))
    admin.config_set("requirepass", "")
    wait_until(lambda: goes_on(terminal))


def test_a_user_whose_rights_or_password_change_sees_it_in_a_line(
    server: Server, opened: list[Terminal]
) -> None:
    admin = server.client
    rights = ("~*", "&*", "+@all")
    admin.execute_command("ACL", "SETUSER", "watcher", "on", ">first", *rights)
    opened.append(terminal := Terminal(*words(server, "watcher:first@"), size=(300, 30)))
    wait_until(lambda: goes_on(terminal))
    admin.execute_command("ACL", "SETUSER", "watcher", "-@all")
    wait_until(lambda: fails(terminal, "'watcher' lacks a right"), view(terminal))
    admin.execute_command("ACL", "SETUSER", "watcher", "+@all")
    wait_until(lambda: goes_on(terminal))
    admin.execute_command("ACL", "DELUSER", "watcher")
    wait_until(lambda: fails(terminal, "check the user and the password"), view(terminal))
    admin.execute_command("ACL", "SETUSER", "watcher", "on", ">first", *rights)
    wait_until(lambda: goes_on(terminal))
    assert "first" not in terminal.text


@pytest.mark.parametrize("fault", [False, True])
def test_a_view_fits_a_terminal_of_40_columns_and_8_lines(
    server: Server, terminal: Terminal, fault: bool
) -> None:
    for number in range(FAR):
        server.client.rpush(f"rq:queue:chat:m{number}", "job")
        server.client.sadd("rq:queues", f"rq:queue:chat:m{number}")
    wait_until(lambda: "nobody" in view(terminal))
    if fault:
        server.send(signal.SIGSTOP)
        wait_until(lambda: "error: " in view(terminal))
    terminal.resize(40, 8)
    looks = terminal.text.count(CLEARED)
    wait_until(lambda: terminal.text.count(CLEARED) > looks + 3)
    shown = view(terminal).removesuffix("\n").split("\n")
    assert sum(max(1, -(-cell_len(line) // 40)) for line in shown) < 8, shown
    assert re.fullmatch(r"\d\d:\d\d:\d\d", shown[0])
    if fault:
        assert shown[1].startswith("error: can't reach Redis") and len(shown) == 2
    else:
        assert shown[1].startswith("no worker serves ")
        assert shown[-1].endswith(" more lines have no room")


def test_ctrl_c_ends_it_and_leaves_the_terminal_as_it_was(
    server: Server, terminal: Terminal
) -> None:
    terminal.interrupt()
    assert terminal.wait() == 130
    assert terminal.text.endswith("interrupted\r\n")
    assert "\x1b[?" not in terminal.text  # no mode was changed: the cursor, the screen
    assert terminal.modes == terminal.before
    assert "Traceback" not in terminal.text


def test_ctrl_c_ends_it_while_redis_hangs(server: Server, terminal: Terminal) -> None:
    server.send(signal.SIGSTOP)
    wait_until(lambda: "error: " in view(terminal))
    terminal.interrupt()
    assert terminal.wait() == 130
    assert terminal.text.endswith("interrupted\r\n") and "Traceback" not in terminal.text


def test_a_pipe_gets_plain_lines_and_its_end_ends_the_command(server: Server, spawn: Spawn) -> None:
    process = spawn(*words(server))
    assert process.stdout is not None and process.stderr is not None
    first = [process.stdout.readline() for _ in range(3)]
    assert re.fullmatch(r"\d\d:\d\d:\d\d\n", first[0])
    assert first[1:] == ["no workers\n", "no queues\n"]
    server.send(signal.SIGSTOP)
    failed = process.stderr.readline()
    assert re.search(r"Redis at .*; since \d\d:\d\d:\d\d \(\d+ s\), trying again", failed), failed
    server.send(signal.SIGCONT)
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(PATIENCE) == 141
    assert "\x1b" not in "".join([*first, failed, errors]) and "Traceback" not in errors


def test_ctrl_c_in_a_pipe_is_one_line(server: Server, spawn: Spawn) -> None:
    process: subprocess.Popen[str] = spawn(*words(server))
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate()[1] == "interrupted\n"
    assert process.returncode == 130


def test_faults_go_once_to_a_file_that_stderr_is(server: Server, tmp_path: Path) -> None:
    server.client.rpush("rq:queue:chat:m", "job")
    server.client.sadd("rq:queues", "rq:queue:chat:m")
    end, side = os.openpty()
    termios.tcsetwinsize(end, (5, 40))
    file = tmp_path / "errors"
    with file.open("wb") as errors:
        process = subprocess.Popen(
            [COMMAND, *words(server)[:2], "--interval", "600", *words(server)[4:]],
            stdin=side,
            stdout=side,
            stderr=errors,
        )
    os.close(side)
    shown = b""
    while b"no room" not in shown:
        shown += os.read(end, 4096)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 130
    os.close(end)
    assert b"serves" not in shown
    (fault, last) = file.read_text().splitlines()
    assert fault.startswith("no worker serves 'm'") and last == "interrupted"
