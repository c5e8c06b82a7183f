"""`chatjobs chat` without a question: a conversation in the terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.cli.dialogue import Dialogue, Stopped
from jobs.cli.failures import sentence
from jobs.cli.output import echo, report
from jobs.cli.printing import call_text
from jobs.cli.usage import TurnUsage
from jobs.sizes import counted

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

GREETING = (
    "Enter sends, Alt-Enter begins a new line, /help lists the commands, /quit or Ctrl-D ends."
)
HELP = """\
/system [TEXT]  show the system message, or set it
/history        show the conversation
/undo           remove the last question and its answer
/reset          begin again, with the same system message
/save FILE      write the conversation to a file; /save --force FILE overwrites any
/load FILE      go on with the conversation of a file
/stats          turns, tokens and speed
/help           this text
/quit, /exit    end, as Ctrl-D does
Ctrl-C          stop the answer, and keep it as far as it got"""


class Conversation:
    """Reads lines until the end of input: questions, and commands that begin with a slash."""

    def __init__(self, dialogue: Dialogue) -> None:
        self._dialogue = dialogue
        self._last, self._all = TurnUsage(), TurnUsage()
        self._commands: dict[str, Callable[[str], None]] = {
            "/system": self._set_system,
            "/history": self._show_history,
            "/undo": self._undo,
            "/reset": self._reset,
            "/save": self._save,
            "/load": self._load,
            "/stats": self._show_stats,
            "/help": lambda _: _say(HELP),
            "/quit": _end,
            "/exit": _end,
        }
        self._written: set[Path] = set()  # by this conversation, which may overwrite them

    def run(self) -> None:
        from jobs import JobError

        prompt = _prompt_session(sorted(self._commands))
        _say(GREETING)
        try:
            while True:
                try:
                    self._take(prompt.prompt("> ").strip())
                except EOFError:
                    return
                except KeyboardInterrupt:
                    _say("(Ctrl-D ends)")
        finally:
            with suppress(JobError):  # it expires all the same
                self._dialogue.close()

    def _take(self, line: str) -> None:
        from jobs import JobError

        try:
            with suppress(JobError):  # the command says so itself, if it needs Redis
                self._dialogue.stop()
            self._run_line(line)
        except JobError as error:
            _complain(sentence(error))

    def _run_line(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name in self._commands:
            self._commands[name](rest.strip())
        elif name.startswith("/"):
            close = get_close_matches(name[1:], [known[1:] for known in self._commands], 1)
            hint = (
                f"did you mean /{close[0]}?"
                if close
                else f"the commands are {', '.join(self._commands)}"
            )
            _complain(f"there is no command {name}: {hint}")
        elif line:
            self._ask(line)

    def _ask(self, question: str) -> None:
        """Run one turn. Ctrl-C stops its answer."""
        started = time.monotonic()
        try:
            usage = self._dialogue.ask(question)
        except Stopped:
            _say("\n(stopped)")
            return
        if usage is not None:
            seconds = time.monotonic() - started
            self._last = TurnUsage(1, usage.prompt_tokens, usage.completion_tokens, seconds)
            self._all = self._all.plus(self._last)

    def _set_system(self, text: str) -> None:
        system, turns = self._dialogue.read()
        if text:
            self._dialogue.reset(turns, system=text)
            _say("the system message is set")
        else:
            _say(system or "there is no system message: /system TEXT sets one")

    def _show_history(self, _: str) -> None:
        from jobs.api.conversation import messages_of

        for message in messages_of(*self._dialogue.read()):
            calls = [call_text(call) for call in message.get("tool_calls") or ()]
            content = message.get("content") or ""
            echo(f"{message['role']}: {' '.join([str(content), *calls]).strip()}")

    def _undo(self, _: str) -> None:
        turn = self._dialogue.undo()
        _say(f"removed: {turn.messages[0].get('content')}")

    def _reset(self, _: str) -> None:
        self._dialogue.reset(())
        self._last = self._all = TurnUsage()
        _say("the conversation begins again")

    def _save(self, rest: str) -> None:
        from jobs.saved import write_conversation

        forced = rest.split(maxsplit=1)[:1] == ["--force"]
        path = _path(rest.removeprefix("--force").strip() if forced else rest, "/save")
        if path is None:
            return
        if os.path.isfile(path) and not forced and path.resolve() not in self._written:
            _complain(f"{path} exists: /save --force {path} overwrites it")
            return
        system, turns = self._dialogue.read()
        write_conversation(path, self._dialogue.model, system, turns)
        self._written.add(path.resolve())
        _say(f"{counted(len(turns), 'turn')} written to {path}")

    def _load(self, name: str) -> None:
        from jobs.saved import read_conversation

        path = _path(name, "/load")
        if path is not None:
            saved = read_conversation(path)
            self._dialogue.reset(saved.turns, system=saved.system)
            _say(f"{counted(len(saved.turns), 'turn')} read from {path}")

    def _show_stats(self, _: str) -> None:
        _, turns = self._dialogue.read()
        _say(f"model {self._dialogue.model}, {counted(len(turns), 'turn')}")
        _say(f"last: {self._last}")
        _say(f"all: {self._all}")


def is_terminal() -> bool:
    """True if stdin and stdout are terminals."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _prompt_session(commands: list[str]) -> PromptSession[str]:
    """The editor of questions, with several lines, the history of this conversation and completion
    of commands. Ctrl-J stays Enter: lines that were typed while an answer was printed end with it.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    bindings = KeyBindings()

    @bindings.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    completer = WordCompleter(commands, sentence=True)
    return PromptSession(
        multiline=True,
        key_bindings=bindings,
        completer=completer,
        complete_while_typing=False,
        prompt_continuation="… ",
    )


def _path(name: str, command: str) -> Path | None:
    if not name:
        _complain(f"{command} needs the name of a file")
        return None
    try:
        return Path(name).expanduser()
    except RuntimeError:  # ~NAME
        _complain(f"{name}: there is no such user")
        return None


def _end(_: str) -> None:
    """End the conversation, as Ctrl-D does."""
    raise EOFError


def _say(text: str) -> None:
    echo(text, err=True, dim=True)


def _complain(text: str) -> None:
    report("error", text, "red")
