"""A command in a pseudo-terminal, which a test reads and types into."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import termios
import threading
from pathlib import Path
from typing import Any

from tests.cli.conftest import COMMAND
from tests.forked import TakeTerminal
from tests.waiting import PATIENCE, wait_until

PROMPT_BEGINS = "\x1b[?2004h"  # the editor takes pasted text from now on
PROMPT_ENDS = "\x1b[?2004l"  # it has taken a line
CONTROL = re.compile(r"\x1b(\[[0-9;?]*[a-zA-Z]|\][^\x07]*\x07|[=>])")


class Terminal:
    """A command whose terminal this test reads and types into. `size`: its columns and lines, which
    `resize` changes; else lines are long."""

    def __init__(self, *words: str, size: tuple[int, int] | None = None) -> None:
        self._end, side = os.openpty()
        self.before = termios.tcgetattr(self._end)
        given = {"COLUMNS": "200"} if size is None else {}
        if size is not None:
            self.resize(*size)
        self._process = subprocess.Popen(
            [COMMAND, *words],
            preexec_fn=TakeTerminal(side),
            env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **given},
        )
        os.close(side)
        self._text = ""
        self._seen = self._prompts = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def type(self, keys: str) -> None:
        """Type at the next prompt: the terminal is in another mode before."""
        self._prompts += 1
        wait_until(
            lambda: self._text.count(PROMPT_BEGINS) >= self._prompts, f"no prompt: {self._text!r}"
        )
        os.write(self._end, keys.encode(errors="surrogateescape"))

    def type_and_wait(self, keys: str) -> None:
        """Type a line, and return when the command has it and waits for a reply to it."""
        self.type(keys)
        wait_until(lambda: self._text.count(PROMPT_ENDS) >= self._prompts)
        self.wait_until_blocked()

    def wait_until_blocked(self) -> None:
        """Until the command sleeps for a while: on a busy machine, one that runs is not asleep."""
        looks: list[str] = []

        def sleeps() -> bool:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text()
            looks.append(stat.rpartition(")")[2].split()[0])
            return looks[-20:] == ["S"] * 20

        wait_until(sleeps)

    def expect(self, text: str) -> str:
        """Wait until `text` is printed after what was expected before. Returns what precedes it."""

        def found() -> bool:
            return text in CONTROL.sub("", self._text)[self._seen :]

        try:
            wait_until(found)
        except AssertionError:
            raise AssertionError(f"{text!r} is not in {self._text!r}") from None
        whole = CONTROL.sub("", self._text)
        at = whole.index(text, self._seen)
        before, self._seen = whole[self._seen : at], at + len(text)
        return before

    @property
    def text(self) -> str:
        """All that was written to it."""
        return self._text

    @property
    def modes(self) -> list[Any]:
        """Those of the terminal, such as echo."""
        return termios.tcgetattr(self._end)

    def resize(self, columns: int, lines: int) -> None:
        termios.tcsetwinsize(self._end, (lines, columns))

    def interrupt(self) -> None:
        """Ctrl-C while an answer is printed."""
        os.write(self._end, b"\x03")

    def wait(self) -> int:
        code = self._process.wait(timeout=PATIENCE)
        self._reader.join(timeout=PATIENCE)
        return code

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        self._reader.join(timeout=PATIENCE)  # else it could read what another test opens next
        os.close(self._end)

    def _read(self) -> None:
        try:
            while data := os.read(self._end, 4096):
                self._text += data.decode(errors="replace")
        except OSError:  # the command has ended
            return
