"""Disks of the tests: file systems in memory, mounted where the test wants them.

Mounting needs root. Without it, `Disk` takes a folder away by renaming it, which leaves an empty
folder at its place as unmounting does, and the tests that need a disk of their own are skipped.
"""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path

import pytest


def _run(*words: str | Path) -> bool:
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


class Disk:
    """A disk at `mount`, which can be taken away and put back with what is on it.

    size: of a file system of its own, such as "100k"; needs mounts.
    """

    def __init__(self, mount: Path, store: Path, size: str | None = None) -> None:
        self.mount, self._store = mount, store
        mount.mkdir(parents=True)
        store.mkdir(parents=True)
        self.mounted = _run("mount", "-t", "tmpfs", "-o", f"size={size or '64m'}", "disk", store)
        if not self.mounted and size is not None:
            pytest.skip("this user can't mount a disk")
        self._there = False
        self.put_back()

    def take_away(self) -> None:
        """An empty folder is left at its place."""
        assert self._there
        if self.mounted:
            assert _run("umount", self.mount)
        else:
            self.mount.rename(self._store / "disk")
            self.mount.mkdir()
        self._there = False

    def put_back(self) -> None:
        assert not self._there
        if self.mounted:
            assert _run("mount", "--bind", self._store, self.mount)
        elif (self._store / "disk").exists():
            self.mount.rmdir()
            (self._store / "disk").rename(self.mount)
        self._there = True

    def remount(self, options: str) -> None:
        """Change options of the file system, such as size=10m or ro."""
        assert _run("mount", "-o", f"remount,{options}", self._store)

    def fill(self) -> None:
        """Write until there is no room."""
        with suppress(OSError), (self.mount / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def close(self) -> None:
        if self.mounted:
            _run("umount", "-l", self.mount)
            _run("umount", "-l", self._store)
