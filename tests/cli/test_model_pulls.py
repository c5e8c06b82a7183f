"""`chatjobs models pull MODEL --worker NAME`: a worker downloads a model that it may serve."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import keys
from jobs.errors import JobError
from jobs.store.operator import send
from jobs.store.worker_status import read_workers
from tests.cli.conftest import Run, Spawn
from tests.cli.test_json import documented
from tests.disks import Disk
from tests.hub import Hub
from tests.worker.checkpoints import make_checkpoint
from tests.worker.site import Site, WorkerProcess, wait_until

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
MODELS = ["org/tiny", "org/gated", "org/none"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", shards=2)


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub which the workers of the test use, and no cache."""
    with Hub() as hub:
        hub.publish("org/tiny", folder)
        hub.gated.add("org/gated")
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "600")  # a file that is held is not late
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield hub
        for event in hub.held.values():
            event.set()


def start(site: Site) -> tuple[WorkerProcess, str]:
    """A worker that may serve MODELS, and its name."""
    worker = site.worker(lease_seconds=30.0, models=MODELS)
    wait_until(lambda: any(one["pid"] == worker.pid for one in read_workers(site.redis)))
    return worker, next(one["name"] for one in read_workers(site.redis) if one["pid"] == worker.pid)


def child_of(pid: int) -> int | None:
    """The process that downloads for a worker."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"worker.loading.pull" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    return None


def ended(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_worker_downloads_models_that_it_may_serve_and_no_others(
    run: Run, site: Site, hub: Hub, folder: Path, tmp_path: Path
) -> None:
    _, name = start(site)
    there = ("--worker", name, "--redis", site.url)
    found = json.loads(run("models", "pull", "org/tiny", "--json", *there).stdout)
    assert set(found) == documented("models pull")
    assert (found["worker"], found["model"], found["downloaded"]) == (name, "tiny", True)
    assert Path(found["folder"]).is_relative_to(tmp_path / "home")
    for shard in (FIRST, SECOND):
        assert (Path(found["folder"]) / shard).read_bytes() == (folder / shard).read_bytes()
    again = run("models", "pull", "tiny", *there)
    assert again.stderr == f"{name}: tiny is in {found['folder']}\n"
    assert {hub.fetched()[shard] for shard in (FIRST, SECOND)} == {1}
    for model, reason in (
        ("org/other", "only models that it was started to serve; this one serves gated, none, tin"),
        ("org/none", "org/none cannot be downloaded: no such repository on the hub"),
        ("org/gated", "org/gated cannot be downloaded: access is gated: accept its terms"),
    ):
        refused = run("models", "pull", model, *there)
        assert refused.exit_code != 0
        assert reason in refused.stderr and refused.stderr.count("\n") == 1
    assert not any("other" in path for _, path, _ in hub.requests)
    gone = run("models", "pull", "org/tiny", "--worker", "nobody", "--redis", site.url)
    assert gone.exit_code == 1 and "no worker nobody" in gone.stderr
    both = run("models", "pull", "org/tiny", "--download-dir", str(tmp_path), *there)
    assert both.exit_code == 2 and "--download-dir is for this machine" in both.stderr


def test_the_size_of_a_download_is_shown_and_one_that_fails_says_so(
    spawn: Spawn, site: Site, hub: Hub
) -> None:
    _, name = start(site)
    hub.broken_files[FIRST] = 500
    failed = spawn("models", "pull", "org/tiny", "--worker", name, "--redis", site.url)
    assert "org/tiny cannot be downloaded" in failed.communicate()[1]
    assert failed.returncode != 0
    hub.broken_files.clear()
    hub.held[FIRST] = threading.Event()
    process = spawn("models", "pull", "org/tiny", "--worker", name, "--redis", site.url)
    assert process.stderr is not None
    first = process.stderr.readline()  # while half of the file has not been sent
    assert first.startswith(f"{name}: downloads tiny, ") and "kB" in first
    hub.held[FIRST].set()
    assert f"{name}: tiny downloaded to" in process.communicate()[1]
    assert process.returncode == 0


def test_a_killed_worker_downloads_no_more_and_the_next_one_keeps_whole_files(
    run: Run, spawn: Spawn, site: Site, hub: Hub, tmp_path: Path
) -> None:
    worker, name = start(site)
    hub.held[SECOND] = threading.Event()
    process = spawn("models", "pull", "org/tiny", "--worker", name, "--redis", site.url)
    cache = tmp_path / "home" / "hub" / "models--org--tiny" / "snapshots"
    wait_until(lambda: any(cache.glob(f"*/{FIRST}")))
    child = child_of(worker.pid)
    assert child is not None
    worker.kill()
    wait_until(lambda: ended(child))
    site.redis.delete(keys.WORKERS)  # its lease has expired
    assert f"worker {name} is gone" in process.communicate()[1]
    assert process.returncode != 0
    hub.held.pop(SECOND).set()
    _, name = start(site)
    done = run("models", "pull", "org/tiny", "--worker", name, "--redis", site.url)
    assert done.exit_code == 0, done.stderr
    assert (hub.fetched()[FIRST], hub.fetched()[SECOND]) == (1, 2)


def test_a_worker_that_stops_ends_its_downloads(site: Site, hub: Hub) -> None:
    worker, name = start(site)
    hub.held[FIRST] = threading.Event()
    answers = send(site.redis, name, "pull", {"model": "org/tiny"}).answers()
    facts = next(answers).facts
    assert 0 <= facts["done_bytes"] < facts["total_bytes"]
    child = child_of(worker.pid)
    assert worker.stop() == 0
    assert child is not None and ended(child)
    with pytest.raises(JobError, match="the worker stops"):
        list(answers)


def test_a_hub_that_breaks_off_or_sends_too_little_or_wrong_bytes_leaves_no_damaged_file(
    run: Run, site: Site, hub: Hub, folder: Path
) -> None:
    _, name = start(site)
    pull = ("models", "pull", "org/tiny", "--worker", name, "--redis", site.url)
    hub.short_files[FIRST] = 1000
    short = run(*pull)
    assert "but has size 1000" in short.stderr and "complete files are kept" in short.stderr
    hub.short_files.clear()
    hub.wrong_files.add(FIRST)
    wrong = run(*pull)
    assert f"org/tiny cannot be downloaded: {FIRST} came with other bytes than" in wrong.stderr
    for failed in (short, wrong):
        assert failed.exit_code == 1
        assert "\n" not in failed.stderr.partition("error: ")[2].removesuffix("\n")
    hub.wrong_files.clear()
    hub.drop_after[FIRST] = (folder / FIRST).stat().st_size // 2
    found = json.loads(run(*pull, "--json").stdout)
    for shard in (FIRST, SECOND):
        assert (Path(found["folder"]) / shard).read_bytes() == (folder / shard).read_bytes()


def test_a_file_that_a_killed_worker_left_is_compared_by_the_next(
    run: Run, spawn: Spawn, site: Site, hub: Hub, tmp_path: Path
) -> None:
    worker, name = start(site)
    hub.held[SECOND] = threading.Event()
    hub.wrong_files.add(FIRST)
    process = spawn("models", "pull", "org/tiny", "--worker", name, "--redis", site.url)
    cache = tmp_path / "home" / "hub" / "models--org--tiny" / "snapshots"
    wait_until(lambda: any(cache.glob(f"*/{FIRST}")))
    worker.kill()
    process.communicate()
    hub.held.pop(SECOND).set()
    hub.wrong_files.clear()
    _, name = start(site)
    pull = ("models", "pull", "org/tiny", "--worker", name, "--redis", site.url)
    assert f"{FIRST} came with other bytes" in run(*pull).stderr
    assert run(*pull).exit_code == 0


def test_two_pulls_at_once_download_each_file_once(
    spawn: Spawn, site: Site, hub: Hub, tmp_path: Path
) -> None:
    _, name = start(site)
    hub.held[FIRST] = threading.Event()
    there = ("--worker", name, "--redis", site.url)
    pulls = [spawn("models", "pull", "org/tiny", *where) for where in (there, there, ())]
    for process in pulls[:2]:
        assert process.stderr is not None
        assert "downloads tiny" in process.stderr.readline()
    hub.held[FIRST].set()
    for process in pulls:
        error = process.communicate()[1]
        assert process.returncode == 0, error
    assert {hub.fetched()[shard] for shard in (FIRST, SECOND)} == {1}


def test_a_pull_that_is_interrupted_goes_on_in_the_worker(
    run: Run, spawn: Spawn, site: Site, hub: Hub
) -> None:
    _, name = start(site)
    hub.held[FIRST] = threading.Event()
    pull = ("models", "pull", "org/tiny", "--worker", name, "--redis", site.url)
    process = spawn(*pull)
    assert process.stderr is not None
    process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert process.stderr.read().endswith(f"interrupted; {name} goes on with the download\n")
    assert process.wait() == 130
    hub.held[FIRST].set()
    assert run(*pull).exit_code == 0
    assert {hub.fetched()[shard] for shard in (FIRST, SECOND)} == {1}


def test_a_worker_without_network_says_so(
    run: Run, site: Site, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    _, name = start(site)
    failed = run("models", "pull", "org/tiny", "--worker", name, "--redis", site.url)
    assert failed.exit_code != 0
    assert "org/tiny cannot be downloaded: " in failed.stderr
    assert "hub cannot be reached" in failed.stderr


def test_a_full_disk_is_named(
    run: Run, site: Site, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(tmp_path / "small", tmp_path / "store", size="160k")
    try:
        monkeypatch.setenv("HF_HOME", str(disk.mount))
        _, name = start(site)
        failed = run("models", "pull", "org/tiny", "--worker", name, "--redis", site.url)
        assert failed.exit_code != 0
        assert "No space left on device; free some, and try again" in failed.stderr
        disk.remount("size=10m")
        done = run("models", "pull", "org/tiny", "--worker", name, "--redis", site.url)
        assert done.exit_code == 0, done.stderr
    finally:
        disk.close()
