"""Processes of this package, forked from one that has imported it: an import of torch costs 3 s."""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

COMMAND = str(Path(sys.executable).with_name("chatjobs"))
MODULES = ("bench.peers.chatjobs_peer", "tests.run_code", "tests.worker.fake_worker")
TEST_PROCESS = [sys.executable, "-u", "-c"]  # how xdist starts one: before a line of code
# Python and the libraries read these when they start.
AT_START = (
    *("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "ASAN_"),
    *("OMP_", "GOMP_", "MKL_", "KMP_", "OPENBLAS_", "TORCH_", "CUDA_", "TRITON"),
)
PR_SET_CHILD_SUBREAPER = 36
_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_prctl = ctypes.CDLL(None).prctl


class TakeTerminal:
    """A preexec_fn: this side of a pseudo-terminal becomes that of the process."""

    def __init__(self, side: int) -> None:
        self.side = side

    def __call__(self) -> None:
        os.login_tty(self.side)


class ForkServer:
    """Forks processes; the process of `tests.fork_server` that does it starts with the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.environment: dict[str, str] = {}

    def can_fork(self, call: dict[str, Any]) -> bool:
        """Whether a process forked with these arguments of Popen is as one that is executed."""
        words = call["args"]
        if isinstance(words, (str, bytes, os.PathLike)) or call["executable"] is not None:
            return False
        words = [os.fsdecode(word) for word in words]
        ours = words[0] == COMMAND or words[:-1] == TEST_PROCESS
        ours = ours or (words[:2] == [sys.executable, "-m"] and words[2] in MODULES)
        begin = call["preexec_fn"]
        plain = begin is None or isinstance(begin, TakeTerminal)
        plain = plain and not (call["pass_fds"] or call["shell"])
        environment = os.environ if call["env"] is None else call["env"]
        plain = plain and _at_start(environment) == _at_start(self.environment)
        # With more, OpenBLAS starts threads when numpy is imported, which a fork has not.
        return ours and plain and self.environment.get("OMP_NUM_THREADS") == "1"

    def fork(self, call: dict[str, Any]) -> int:
        """Return the id of the process, a child of this one."""
        words = [os.fsdecode(word) for word in call["args"]]
        begin = call["preexec_fn"]
        order = {
            "argv": words if words[0] == COMMAND else words[1:],
            "env": dict(os.environ if call["env"] is None else call["env"]),
            "cwd": os.fspath(call["cwd"] or os.getcwd()),
            "new_session": bool(call["start_new_session"] or begin),
            "terminal": begin is not None,
        }
        descriptors = [call["p2cread"], call["c2pwrite"], call["errwrite"]]
        descriptors = descriptors if begin is None else [begin.side] * 3
        given = [number if one == -1 else one for number, one in enumerate(descriptors)]
        with self._lock:
            if self._connection is None:
                self._start()
            assert self._connection is not None
            _prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._connection, [json.dumps(order).encode()], given)
                answer = self._connection.recv(32)
            finally:
                _prctl(PR_SET_CHILD_SUBREAPER, 0)
        assert answer, "the fork server ended"
        return int(answer)

    def connect(self, connection: socket.socket) -> None:
        """Use a server that runs already, a child of this process."""
        self._connection = connection

    def close(self) -> None:
        """End the server; the processes that it forked go on."""
        if self._connection is not None and self._process is not None:
            self._connection.close()
            self._process.wait()
            self._connection = self._process = None

    def _start(self) -> None:
        self._connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            command = [sys.executable, "-m", "tests.fork_server", str(other.fileno())]
            self._process = subprocess.Popen(
                command,
                cwd=Path(__file__).parent.parent,
                # A fork keeps only the thread that forks: Arrow's allocator starts none.
                env={**self.environment, "JE_ARROW_MALLOC_CONF": "background_thread:false"},
                pass_fds=(other.fileno(),),
            )


SERVER = ForkServer()


def fork_processes() -> None:
    """Fork the processes of this package from now on, in the environment of this moment."""
    SERVER.environment = dict(os.environ)
    subprocess.Popen = ForkingPopen  # type: ignore[misc]


class ForkingPopen(subprocess.Popen):
    """`subprocess.Popen` that forks the processes of this package."""

    def _execute_child(self, *arguments: Any) -> None:
        call = inspect.signature(_execute).bind(self, *arguments).arguments
        if not SERVER.can_fork(call):
            _execute(self, *arguments)
            return
        self.pid = SERVER.fork(call)
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(call[name] for name in pipes))  # type: ignore[attr-defined]


def _at_start(environment: Any) -> dict[str, str]:
    return {
        os.fsdecode(name): os.fsdecode(value)
        for name, value in environment.items()
        if os.fsdecode(name).startswith(AT_START)
    }
