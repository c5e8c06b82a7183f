"""The results folder goes away under a running worker: rows wait, and everybody says why."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs import JobError, keys
from jobs.record import recorder as module
from jobs.store.results_folder import ID_FILE
from tests.disks import Disk
from tests.jobs.record.outboxes import RUN, fill
from tests.jobs.record.status import assert_rows_wait, status, write_one
from tests.worker.site import PATIENCE, Site, wait_until


def test_rows_wait_while_the_disk_is_unmounted(site: Site, make_disk: Callable[..., Disk]) -> None:
    disk = make_disk(site.folder)
    worker = site.worker()
    jobs = [write_one(site, 0)]
    site.client.wait_for_rows(jobs, timeout=PATIENCE)
    disk.take_away()
    jobs.append(assert_rows_wait(site, 1, ID_FILE))
    assert os.listdir(site.folder) == []
    disk.put_back()
    site.client.wait_for_rows(jobs, timeout=PATIENCE)
    site.assert_settled(jobs, RUN)
    wait_until(lambda: status(site).exit_code == 0)
    assert worker.stop() == 0
    assert str(site.folder) in worker.output
    assert "rows are written again" in worker.output


def test_rows_wait_while_the_folder_is_moved_aside(site: Site, tmp_path: Path) -> None:
    site.worker()
    jobs = [write_one(site, 0)]
    site.client.wait_for_rows(jobs, timeout=PATIENCE)
    site.folder.rename(tmp_path / "aside")
    jobs.append(assert_rows_wait(site, 1, "put the folder back"))
    assert not site.folder.exists()
    (tmp_path / "aside").rename(site.folder)
    site.client.wait_for_rows(jobs, timeout=PATIENCE)
    site.assert_settled(jobs, RUN)


def test_another_folder_at_the_path_gets_no_row(site: Site, tmp_path: Path) -> None:
    site.worker()
    jobs = [write_one(site, 0)]
    site.client.wait_for_rows(jobs, timeout=PATIENCE)
    site.folder.rename(tmp_path / "aside")
    site.folder.mkdir()
    (site.folder / ID_FILE).write_text("other\n")
    assert_rows_wait(site, 1, "another folder")
    assert os.listdir(site.folder) == [ID_FILE]


def test_a_copy_on_another_disk_gets_no_row_until_a_restart(
    site: Site, make_disk: Callable[..., Disk]
) -> None:
    worker = site.worker()
    jobs = [write_one(site, 0)]
    site.client.wait_for_rows(jobs, timeout=PATIENCE)
    copy = site.folder.parent / "copy"
    shutil.copytree(site.folder, copy)
    for number in range(5):  # so that the copied file has another number
        (copy / f"{number}").touch()
    site.folder.rename(site.folder.parent / "aside")
    disk = make_disk(site.folder)
    if not disk.mounted:
        pytest.skip("this user can't mount a disk")
    for number in range(5):
        (site.folder / f"{number}").touch()
    shutil.copytree(copy, site.folder, dirs_exist_ok=True)
    jobs.append(assert_rows_wait(site, 1, "copy"))
    worker.stop()
    site.worker()
    site.client.wait_for_rows(jobs, timeout=PATIENCE)
    site.assert_settled(jobs, RUN)


def test_after_a_deletion_a_restarted_worker_begins_anew_for_all(site: Site) -> None:
    """As the error advises. The id is that of before, so that workers which wait go on."""
    waiting = site.worker()
    site.client.wait_for_rows([write_one(site, 0)], timeout=PATIENCE)
    shutil.rmtree(site.folder)
    job = assert_rows_wait(site, 1, "if it was deleted for good, restart one worker")
    new = site.worker(models=["other"])
    site.client.wait_for_rows([job], timeout=PATIENCE)
    assert [row["job_id"] for row in site.rows(RUN)] == [job.id]
    assert new.stop() == 0
    assert "begins anew" in new.output
    last = write_one(site, 2)
    site.client.wait_for_rows([last], timeout=PATIENCE)
    assert waiting.stop() == 0
    assert len(site.rows(RUN)) == 2


def test_a_worker_does_not_start_beside_its_unmounted_disk(
    site: Site, make_disk: Callable[..., Disk]
) -> None:
    disk = make_disk(site.folder)
    if not disk.mounted:
        pytest.skip("this user can't mount a disk")
    site.submit("one")
    site.burst()
    disk.take_away()
    job = site.submit("two")
    with pytest.raises(JobError, match="mount the disk that was there") as caught:
        site.burst()
    assert "\n" not in caught.value.message
    assert os.listdir(site.folder) == []
    site.redis.delete(keys.RESULTS)  # as the error advises, if the disk is gone for good
    site.burst()
    assert [row["job_id"] for row in site.rows()] == [job.id]


def test_an_id_file_that_a_power_cut_left_empty_is_written_again(site: Site) -> None:
    site.submit("one")
    site.burst()
    found = (site.folder / ID_FILE).read_text()
    (site.folder / ID_FILE).write_text("")
    site.submit("two")
    site.burst()
    assert (site.folder / ID_FILE).read_text() == found
    assert len(site.rows()) == 2


def test_a_disk_that_does_not_answer_is_reported(
    site: Site, make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As an NFS server that is away: here a pipe stands for the file that is read."""
    monkeypatch.setattr(module, "SLOW_FILE_SECONDS", 0.2)
    recorder = make("a")
    found = (site.folder / ID_FILE).read_text()
    (site.folder / ID_FILE).unlink()
    os.mkfifo(site.folder / ID_FILE)
    fill(site, 3)
    recorder.start()
    wait_until(lambda: "has not answered" in recorder.state["error"])
    assert str(site.folder) in recorder.state["error"]
    (site.folder / ID_FILE).rename(tmp_path / "pipe")
    (site.folder / ID_FILE).write_text(found)
    with (tmp_path / "pipe").open("w") as pipe:
        pipe.write(found)
    wait_until(lambda: "has not answered" not in recorder.state["error"])
