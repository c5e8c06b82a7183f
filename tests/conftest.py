"""A real Redis server for the tests: one private server per session, flushed before each test."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import redis
from hypothesis import HealthCheck, settings

from jobs.embedded import EmbeddedRedis
from tests.forked import SERVER, fork_processes
from tests.kernel_levels import levels_here
from tests.waiting import wait_until
from worker.kernels import build
from worker.kernels.compilers import CannotBuild
from worker.kernels.formats import FORMATS

# Shells start background jobs with SIGINT ignored, and the commands under test would inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Examples are the same in each run, and a slow machine fails none.
settings.register_profile(
    "chatjobs",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("chatjobs")

# The models of the tests are so small that a second thread costs more than it computes. The tests
# of kernels use several (tests/worker/kernels/conftest.py).
os.environ.setdefault("OMP_NUM_THREADS", "1")
# OpenMP's threads of several processes share the cores here: they sleep soon instead of spinning.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# The tests of GPUs run by themselves; all others compute on the CPU, also on a machine with a GPU.
ON_GPU = os.environ.get("CHATJOBS_TEST_GPU") == "1"
if not ON_GPU:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# Without bytecode in files, every command and every process of xdist compiles all modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

HERE = Path(__file__).parent
# Their tests wait for processes most of the time; those of other folders of `worker` compute.
WAITING = {"queue"}
# Files of half a minute and more, in which they mostly wait: they start first, so that none runs
# alone at the end.
LONGEST = {
    *("test_hang_later.py", "test_idle_cost.py", "test_outages.py", "test_soak.py"),
    *("test_unwritable.py", "test_wheel.py"),
}


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the kernels before the first test: on a busy machine that takes longer than a test
    may. The tests of GPUs need none, and a fork of a process with CUDA can't use it."""
    if ON_GPU or session.config.pluginmanager.hasplugin("tests.quick"):
        return
    for level in levels_here():
        with suppress(CannotBuild):
            build.library_paths(level, [None, *FORMATS])
    fork_processes()


def pytest_collection() -> None:
    """Nothing becomes garbage while modules are imported, and looking for it takes seconds."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Keep the collector from objects that stay until the end of the run."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In test processes of xdist, spread files that wait among files that compute: together they
    keep the cores busy."""
    if not hasattr(config, "workerinput"):
        return
    groups: dict[bool, list[Path]] = {True: [], False: []}
    for path in dict.fromkeys(item.path for item in items):
        groups[_waits(path)].append(path)
    place = {
        path: index / len(group) for group in groups.values() for index, path in enumerate(group)
    }
    items.sort(key=lambda item: (item.path.name not in LONGEST, place[item.path]))


def _waits(file: Path) -> bool:
    parts = file.relative_to(HERE).parts
    return parts[0] != "worker" or parts[1] in WAITING


def pytest_sessionfinish() -> None:
    SERVER.close()
    # duckdb reports objects that are frozen at exit as leaks; commands that tests call freeze, too.
    atexit.unregister(gc.freeze)
    atexit.register(gc.unfreeze)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    """A server with a unix socket and a TCP port."""
    with EmbeddedRedis(port=0) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> Iterator[str]:
    """URL of an empty database. Fails a test that leaves a subscription behind."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
        yield redis_server.url
        wait_until(lambda: not client.pubsub_channels(), "a subscription is left")
