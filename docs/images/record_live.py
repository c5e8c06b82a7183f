"""Write live.png, the picture of the gateway's page in the README.

    python -m docs.images.record_live

Starts a private Redis, a worker with the demo model, a run of its data set and a gateway, holds a
conversation in headless Chromium, and takes a picture while the run goes on. Only the host name is
replaced by "host".
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jobs.embedded import EmbeddedRedis
from tests.browser.chromium import Page, opened
from tests.jobs.gateway.conftest import GatewayProcess

PICTURE = Path(__file__).parent / "live.png"
CHATJOBS = Path(sys.executable).with_name("chatjobs")
ROWS = 2_000
ANSWER = "[...document.querySelectorAll('.turn.assistant .text')].at(-1)?.textContent"
RENAME = """for (const cell of document.querySelectorAll('#workers th *'))
    cell.textContent = cell.textContent.replaceAll({}, 'host')"""


@contextmanager
def running(*words: str) -> Iterator[None]:
    """A command of chatjobs, which is killed at the end."""
    process = subprocess.Popen([CHATJOBS, *words], stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    with tempfile.TemporaryDirectory() as name, EmbeddedRedis() as server:
        folder = Path(name)
        data = folder / "sums.jsonl"
        with data.open("w") as file:
            for row in range(ROWS):
                file.write(json.dumps({"question": f"What is {row % 90} + {row % 7}?"}) + "\n")
        at = ("--redis", server.url, "--results", str(folder / "results"))
        with (
            running("work", "--model", "demo", *at),
            running("run", str(data), "--model", "demo", "--run", "sums", *at),
            opened(folder / "profile") as browser,
        ):
            gateway = GatewayProcess(server.url, "--results", str(folder / "results"))
            page = Page(browser)
            page.show(f"{gateway.url}/", 1280, "light")
            try:
                page.value("document.getElementById('temperature').value = '0'")
                for question in ("What is 17 + 25?", "What is 2 + 3?"):
                    page.wait("!document.getElementById('send').disabled")
                    page.value("document.getElementById('prompt').focus()")
                    page.type(question)
                    page.press("Enter")
                    page.wait(f"document.getElementById('stop').hidden && ({ANSWER})")
                rows = "document.querySelector('#runs progress')?.value"
                page.wait(f"{rows} > {ROWS // 4}")
                page.value("document.activeElement.blur()")
                page.value(RENAME.format(json.dumps(socket.gethostname().split(".")[0])))
                page.screenshot(PICTURE)
            finally:
                gateway.kill()


if __name__ == "__main__":
    main()
