"""Record `chatjobs demo` and write demo.svg, the picture in the README.

    python docs/images/record_demo.py

Runs the command in a pseudo-terminal, in a temporary folder, and draws the final screen. The text
is the command's own output; only the host name in the worker's name is replaced by "host".
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import socket
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).parent / "demo.svg"
CHATJOBS = Path(sys.executable).with_name("chatjobs")
WORDS = ("chatjobs", "demo")
COLUMNS, ROWS = 72, 50
TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\n|[^\x1b\r\n]+")
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace"


def record(folder: Path) -> str:
    """Return what the command writes to a terminal, escape sequences included."""
    terminal, child_side = pty.openpty()
    fcntl.ioctl(child_side, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {"HOME": str(folder), "PATH": os.environ["PATH"], "TERM": "xterm-256color"}
    if "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    process = subprocess.Popen(
        [CHATJOBS, *WORDS[1:]],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=child_side,
        stderr=child_side,
    )
    os.close(child_side)
    output = bytearray()
    while block := _read(terminal):
        output += block
    os.close(terminal)
    if process.wait() != 0:
        raise SystemExit(f"{' '.join(WORDS)} failed:\n{output.decode()}")
    return output.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux reports EIO once the child has closed its side
        return b""


def screen(output: str) -> list[str]:
    """Return the lines on the screen after `output`, with their colours.

    Knows what rich's progress bar uses: whole-line erase and cursor up.
    """
    lines, row = [""], 0
    for token in TOKEN.finditer(output):
        argument, command = token.groups()
        if token[0] == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        elif command == "A":
            row -= int(argument or 1)
        elif command == "K":
            lines[row] = ""
        elif command is None or command == "m":
            lines[row] += token[0]
    return lines


def draw(text: Text) -> str:
    """Return an SVG of a terminal window with `text`."""
    console = Console(
        record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False
    )
    console.print(text)
    svg = console.export_svg(title=" ".join(WORDS), unique_id="demo")
    # Fonts of the reader's system: GitHub blocks the downloads that rich asks for.
    svg = re.sub(r" *@font-face \{.*?\}\n", "", svg, flags=re.DOTALL)
    return svg.replace("Fira Code, monospace", FONTS)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        output = record(Path(folder))
    output = output.replace(f"worker {socket.gethostname().split('.')[0]}-", "worker host-")
    text = Text.from_ansi("\n".join([f"$ {' '.join(WORDS)}", *screen(output.rstrip())]))
    PICTURE.write_text(draw(text), encoding="utf-8")
    print(text.plain)


if __name__ == "__main__":
    main()
