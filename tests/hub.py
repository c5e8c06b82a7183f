"""A fake Hugging Face Hub: the endpoints that huggingface_hub uses to download a repository.

It serves folders over HTTP on localhost and records all requests. It can refuse requests, fail,
drop the connection in the middle of a file, send other bytes, or redirect to another host. Clients
find it through HF_ENDPOINT.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/(?P<what>revision|tree)/(?P<revision>[^/?]+)")
FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>[^?]+)")
LARGE = {".safetensors", ".gguf"}  # in LFS
PART_OF_FILE = re.compile(r"bytes=(\d+)-(\d+)")


class Hub:
    """A running hub, as a context manager. Its attributes may be changed at any time."""

    def __init__(self) -> None:
        self._repos: dict[str, dict[str, tuple[str, Path]]] = {}
        self._aliases: dict[str, str] = {}
        self.gated: set[str] = set()
        self.broken_files: dict[str, int] = {}  # file name → HTTP status to return
        self.answers: dict[str, tuple[int, bytes]] = {}  # part of a path → what is sent instead
        self.silent_files: set[str] = set()  # files for which the hub closes the connection
        self.short_files: dict[str, int] = {}  # file name → bytes that the hub says it has
        self.wrong_files: set[str] = set()  # files of which one byte is another than was announced
        self.plain_sha1 = False  # a mirror that calls small files by their sha1
        self.no_hashes = False  # a mirror that calls files by something else
        self.elsewhere: str | None = None  # the endpoint that is to send the files
        self.drop_after: dict[str, int] = {}  # file name → bytes of it to send, once
        self.held: dict[str, threading.Event] = {}  # file name → when its second half is sent
        self.requests: list[tuple[str, str, str | None]] = []  # method, path, Range
        self.logins: set[str | None] = set()  # the Authorization headers of all requests
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def publish(self, repo: str, folder: Path, revision: str = "main") -> str:
        """Serve a folder as a revision of a repository; returns the commit's hash."""
        digest = hashlib.sha1(f"{repo}@{revision}".encode())
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                digest.update(file.read_bytes())
        commit = digest.hexdigest()
        revisions = self._repos.setdefault(repo, {})
        revisions[revision] = revisions[commit] = (commit, folder)
        return commit

    def rename(self, old: str, new: str) -> None:
        """Redirect an old name to a repository's new name."""
        self._aliases[old] = new

    def fetched(self) -> Counter[str]:
        """The number of requests for each file's content, without those for limited parts."""
        paths = [
            FILE.match(path)
            for method, path, wanted in self.requests
            if method == "GET" and not PART_OF_FILE.fullmatch(wanted or "")
        ]
        return Counter(match["path"] for match in paths if match)

    def ranges(self, name: str) -> list[str]:
        """The Range headers of the requests for a file, in order."""
        return [wanted for _, path, wanted in self.requests if path.endswith(name) and wanted]

    # --- responses --------------------------------------------------------------------------------

    def find(self, repo: str, revision: str) -> tuple[str, Path] | tuple[int, str]:
        """(commit, folder), or (status, X-Error-Code)."""
        if repo in self.gated:
            return 403, "GatedRepo"
        if repo not in self._repos:
            return 404, "RepoNotFound"
        return self._repos[repo].get(revision, (404, "RevisionNotFound"))

    def describe(self, what: str, repo: str, commit: str, folder: Path) -> Any:
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        if what == "revision":
            names = [{"rfilename": str(file.relative_to(folder))} for file in files]
            return {"id": repo, "modelId": repo, "sha": commit, "siblings": names}
        return [self._entry(folder, file) for file in files]

    def _entry(self, folder: Path, file: Path) -> Mapping[str, Any]:
        size = file.stat().st_size
        entry: dict[str, Any] = {
            "type": "file",
            "path": str(file.relative_to(folder)),
            "size": size,
            "oid": git_id(file),
        }
        if file.suffix in LARGE:
            entry["lfs"] = {"oid": sha256_of(file), "size": size, "pointerSize": 134}
        return entry

    def _etag(self, file: Path) -> str:
        if self.no_hashes:
            return f"{file.stat().st_mtime_ns:x}-{file.stat().st_size:x}"
        if file.suffix in LARGE:
            return sha256_of(file)
        return hashlib.sha1(file.read_bytes()).hexdigest() if self.plain_sha1 else git_id(file)

    def take_drop(self, name: str, fetched: bool) -> int | None:
        if not fetched:
            return None
        with self._lock:
            return self.drop_after.pop(name, None)

    def _handler(hub) -> type[BaseHTTPRequestHandler]:  # there, self is the request
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                hub.requests.append((self.command, self.path, self.headers.get("Range")))
                hub.logins.add(self.headers.get("Authorization"))
                for part, (status, body) in hub.answers.items():
                    if part in self.path:
                        return self._send(status, {"Content-Type": "text/html"}, body)
                api, file = API.match(self.path), FILE.match(self.path)
                match = api or file
                if match is None:
                    return self._refuse(404, "EntryNotFound")
                repo = hub._aliases.get(match["repo"], match["repo"])
                if repo != match["repo"]:
                    return self._redirect(self.path.replace(match["repo"], repo, 1))
                found = hub.find(repo, match["revision"])
                if isinstance(found[0], int):
                    return self._refuse(found[0], str(found[1]))
                commit, folder = found[0], Path(found[1])
                if api:
                    body = json.dumps(hub.describe(api["what"], repo, commit, folder)).encode()
                    return self._send(200, {"Content-Type": "application/json"}, body)
                return self._file(commit, folder / match["path"])

            def _file(self, commit: str, file: Path) -> None:
                if not file.is_file():
                    return self._refuse(404, "EntryNotFound")
                fetched = self.command == "GET"  # not HEAD
                if fetched and file.name in hub.broken_files:
                    return self._refuse(hub.broken_files[file.name], "")
                if fetched and file.name in hub.silent_files:
                    self.close_connection = True
                    return None
                content = file.read_bytes()
                if fetched:
                    content = content[: hub.short_files.get(file.name)]
                    if file.name in hub.wrong_files:
                        content = content[:-1] + bytes([content[-1] ^ 1])
                headers = {
                    "ETag": f'"{hub._etag(file)}"',
                    "X-Repo-Commit": commit,
                    "Accept-Ranges": "bytes",
                }
                if hub.elsewhere is not None:
                    headers["X-Linked-ETag"] = headers["ETag"]
                    headers["X-Linked-Size"] = str(len(content))
                    return self._redirect(hub.elsewhere + self.path, headers)
                asked = PART_OF_FILE.fullmatch(self.headers.get("Range") or "")
                if asked is not None:
                    begin, end = int(asked[1]), min(int(asked[2]) + 1, len(content))
                    headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
                    return self._send(206, headers, content[begin:end])
                wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
                if wanted is None:
                    drop = hub.take_drop(file.name, fetched)
                    return self._send(200, headers, content, drop, hub.held.get(file.name))
                start = int(wanted[1])
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
                return self._send(206, headers, content[start:], hub.take_drop(file.name, fetched))

            def _redirect(self, path: str, headers: Mapping[str, str] | None = None) -> None:
                self._send(307, {**(headers or {}), "Location": path}, b"")

            def _refuse(self, status: int, code: str) -> None:
                message = {"X-Error-Code": code, "X-Error-Message": code} if code else {}
                self._send(status, message, b"{}")

            def _send(
                self,
                status: int,
                headers: dict[str, str],
                body: bytes,
                drop: int | None = None,
                held: threading.Event | None = None,
            ) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "HEAD":
                    return
                if held is not None:
                    half = len(body) // 2
                    self.wfile.write(body[:half])
                    held.wait()
                    with suppress(OSError):  # nobody reads any more
                        self.wfile.write(body[half:])
                    return
                self.wfile.write(body[:drop])
                if drop is not None:
                    self.close_connection = True

        return Handler


def sha256_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def git_id(file: Path) -> str:
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
