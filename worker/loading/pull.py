"""Downloads models in a process of its own: `python -m worker.loading.pull CACHE REFERENCE…`.

A worker starts it (worker/residency/pull_command.py), so that a download that hangs or is stopped
holds no thread of the worker. CACHE is empty for the default. It writes JSON lines to stdout: the
bytes that have arrived, then that they are compared with their hashes, and at the end the folder of
the first model, or an error. It ends when its
standard input does, which is when the worker has ended.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs.errors import failure_of
from worker.checkpoint.source import ModelSource
from worker.loading.find import find

REPORT_SECONDS = 0.5  # between two lines about the bytes that have arrived


def pull(references: Sequence[str], cache: Path | None) -> dict[str, Any]:
    """Download what is missing of each model. Raises JobError."""
    sources = []
    downloaded = False
    for reference in references:
        source = find(reference, cache)
        sources.append(source)
        if source.needs_download:
            downloaded = True
            _download(source)
    return {"folder": str(sources[0].path), "downloaded": downloaded}


def _download(source: ModelSource) -> None:
    sizes, over = source.download_sizes(), threading.Event()
    reports = threading.Thread(target=_report, args=(sizes, over), daemon=True)
    reports.start()
    try:
        source.download_weights()
    finally:
        over.set()
        reports.join()


def _report(sizes: Mapping[Path, int], over: threading.Event) -> None:
    """Write how many bytes have arrived, and whether all are compared now, until it is over."""
    # snapshots/<commit> is beside blobs, where the files grow.
    folders = {path.parent.parent.parent / "blobs" for path in sizes}
    before = _growing(folders)
    total = sum(sizes.values())
    while not over.wait(REPORT_SECONDS):
        complete = sum(size for path, size in sizes.items() if path.is_file())
        growing = sum(size for _, size in _growing(folders) - before)
        arrived = {"done_bytes": min(total, complete + growing), "total_bytes": total}
        _write({**arrived, "comparing": complete == total})


def _growing(folders: set[Path]) -> set[tuple[Path, int]]:
    """The files that are not complete, and their bytes."""
    found = set()
    for folder in folders:
        for path in folder.glob("*.incomplete"):
            try:
                found.add((path, path.stat().st_size))
            except OSError:  # it is complete now
                continue
    return found


def _write(line: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _end_with_worker() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def main() -> None:
    threading.Thread(target=_end_with_worker, daemon=True).start()
    cache, *references = sys.argv[1:]
    try:
        _write(pull(references, Path(cache) if cache else None))
    except Exception as error:
        _write({"error": failure_of(error).to_dict()})
    os._exit(0)  # no thread of the library keeps the process


if __name__ == "__main__":
    main()
