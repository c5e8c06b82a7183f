"""Headless Chromium, driven over a pipe by the DevTools protocol: no package and no port is needed.

Messages are JSON with a zero byte behind each, on the descriptors 3 and 4 of the browser.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from tests.waiting import wait_until

COMMAND = next((one for one in ("chromium", "chromium-browser") if shutil.which(one)), None)
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-extensions",
    "--no-first-run",
    "--remote-debugging-pipe",
)
Scheme = Literal["light", "dark"]


class Page:
    """A tab. Of the document that it shows, as far as `collect` has taken it: `problems`: what is
    in the console; `requests`: the addresses that were loaded, its own first."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def show(self, address: str, width: int, scheme: Scheme) -> None:
        """Open a document as a device of this width would, and wait until it is loaded."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=844,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        preference = {"name": "prefers-color-scheme", "value": scheme}
        self._call("Emulation.setEmulatedMedia", media="screen", features=[preference])
        self._browser.take_events()
        self._call("Page.navigate", url=address)
        self._browser.wait_for("Page.loadEventFired")
        self.problems, self.requests = [], []
        self.collect()

    def value(self, expression: str) -> Any:
        """The value of an expression of JavaScript, which runs beside the page's policy."""
        found = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true."""
        wait_until(lambda: self.value(f"Boolean({expression})"), f"{expression} is never true")

    def press(self, key: str) -> None:
        """Press and release a key."""
        code, text = {"Tab": (9, ""), "Enter": (13, "\r"), "Escape": (27, "")}[key]
        for kind in ("keyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **({"text": text} if text and kind == "keyDown" else {}),
            )

    def type(self, text: str) -> None:
        """Type into the element that has the focus."""
        self._call("Input.insertText", text=text)

    def accessibility(self) -> list[dict[str, Any]]:
        """What assistive technology sees."""
        nodes: list[dict[str, Any]] = self._call("Accessibility.getFullAXTree")["nodes"]
        return nodes

    def screenshot(self, file: Path) -> None:
        """Write the whole page as PNG."""
        taken = self._call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        file.write_bytes(base64.b64decode(taken["data"]))

    def print(self, file: Path) -> None:
        """Write the page as PDF."""
        printed = self._call("Page.printToPDF", printBackground=False)
        file.write_bytes(base64.b64decode(printed["data"]))

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)

    def _call(self, method: str, **parameters: Any) -> Any:
        return self._browser.call(method, self._session, **parameters)

    def collect(self) -> None:
        """Add what has happened since to `problems` and `requests`."""
        for event in self._browser.take_events():
            content = event["params"]
            if event["method"] == "Log.entryAdded":
                self.problems.append(content["entry"]["text"])
            elif event["method"] == "Runtime.exceptionThrown":
                self.problems.append(content["exceptionDetails"]["text"])
            elif event["method"] == "Runtime.consoleAPICalled":
                self.problems.append(str(content["args"]))
            elif event["method"] == "Network.requestWillBeSent":
                self.requests.append(content["request"]["url"])


class Browser:
    """A running browser."""

    def __init__(self, profile: Path) -> None:
        assert COMMAND is not None
        commands, self._out = os.pipe()
        self._in, replies = os.pipe()
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                f'exec "$@" 3<&{commands} 4>&{replies}',
                "bash",
                COMMAND,
                *OPTIONS,
                f"--user-data-dir={profile}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(commands, replies),
        )
        os.close(commands)
        os.close(replies)
        self._rest, self._number = b"", 0
        self._events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, /, **parameters: Any) -> Any:
        """The result of a method."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (reply := self._next()).get("id") != self._number:
            self._events.append(reply)
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']['message']}")
        return reply["result"]

    def wait_for(self, method: str) -> None:
        """Wait until an event has come, since the last `take_events`."""
        while all(one["method"] != method for one in self._events):
            self._events.append(self._next())

    def take_events(self) -> list[dict[str, Any]]:
        taken, self._events = self._events, []
        return taken

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._in, 1 << 20)
            if not part:
                raise RuntimeError(f"{COMMAND} ended with {self._process.wait()}")
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message


@contextmanager
def opened(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile."""
    browser = Browser(profile)
    try:
        yield browser
    finally:
        browser.close()
