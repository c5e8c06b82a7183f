"""One results folder per Redis, and workers that write no results."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jobs import JobError, keys
from jobs.record.folder import claim_folder
from jobs.store.results_folder import ID_FILE, read_id
from tests.worker.site import Site


def test_a_worker_with_another_folder_refuses_to_start_and_names_both(
    site: Site, tmp_path: Path
) -> None:
    site.submit("one")
    site.burst()
    with pytest.raises(JobError) as caught:
        site.burst(results=tmp_path / "elsewhere")
    message = caught.value.message
    assert f"{tmp_path / 'elsewhere'} on" in message
    assert f"{site.folder} on" in message
    assert "--no-record" in message
    assert "\n" not in message
    site.submit("two")
    site.burst()
    assert len(site.rows()) == 2


def test_a_folder_is_known_under_any_path(site: Site, tmp_path: Path) -> None:
    site.submit("one")
    site.burst()
    mounted = tmp_path / "mounted"
    mounted.symlink_to(site.folder)
    site.submit("two")
    site.burst(results=mounted)
    assert len(site.rows()) == 2


def test_workers_that_start_at_once_give_a_folder_one_id(site: Site) -> None:
    """Also with one pid and no shared memory, as in containers that share the disk."""
    for _ in range(5):
        site.redis.delete(keys.RESULTS)
        (site.folder / ID_FILE).unlink(missing_ok=True)
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda _: claim_folder(site.redis, site.folder), range(16)))
        assert os.listdir(site.folder) == [ID_FILE]
        assert json.loads(site.redis.get(keys.RESULTS))["id"] == read_id(site.folder)


def test_the_folder_can_be_changed(site: Site, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        claim_folder(site.redis, tmp_path / name)
        assert json.loads(site.redis.get(keys.RESULTS))["path"] == str(tmp_path / name)
        site.redis.delete(keys.RESULTS)


def test_errors_name_the_absolute_path(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = claim_folder(site.redis, Path("mine"))
    (tmp_path / "mine" / ID_FILE).unlink()
    with pytest.raises(OSError, match=f"the results folder {tmp_path / 'mine'} has no file"):
        folder.check()
    site.redis.delete(keys.RESULTS)
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match=f"the results folder {tmp_path / 'file'} can't be used"):
        claim_folder(site.redis, Path("file"))


def test_a_worker_without_results_leaves_the_rows_to_others(site: Site) -> None:
    jobs = site.submit_many(["one", "two"], run="r1")
    site.burst(results=None)
    assert all(job.status() == "finished" for job in jobs)
    assert not site.folder.exists()
    assert site.redis.xlen(keys.outbox("r1")) == 2
    site.burst()
    site.assert_settled(jobs, "r1")


@pytest.mark.parametrize("value", [b"x", b"[]", b'{"id":3}', b"\xff", None])
def test_a_foreign_value_in_the_key_of_the_folder_is_named(site: Site, value: Any) -> None:
    if value is None:
        site.redis.rpush(keys.RESULTS, "no string")
    else:
        site.redis.set(keys.RESULTS, value)
    with pytest.raises(JobError, match="chatjobs:results in Redis does not hold"):
        claim_folder(site.redis, site.folder)


def test_the_note_of_an_older_version_gets_the_device_of_the_folder(site: Site) -> None:
    """So that the folder can begin anew on the same disk after it was deleted."""
    site.burst()
    note = json.loads(site.redis.get(keys.RESULTS))
    site.redis.set(keys.RESULTS, json.dumps({key: note[key] for key in ("id", "host", "path")}))
    site.burst()
    assert json.loads(site.redis.get(keys.RESULTS)) == note
    shutil.rmtree(site.folder)
    site.burst()
    assert read_id(site.folder) == note["id"]
