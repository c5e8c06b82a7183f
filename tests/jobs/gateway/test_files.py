"""/v1/files with the openai package and bare HTTP, against gateways as processes."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai.types import FileDeleted, FileObject

from jobs.gateway.failures import HttpError
from jobs.gateway.files.stored import DATA, FACTS, FileStore
from jobs.gateway.folders import LEFT_SECONDS, UNFINISHED
from jobs.gateway.ids import FILE, is_id, new_id
from jobs.gateway.paging import Page
from tests.jobs.gateway.conftest import Start
from tests.jobs.gateway.test_bad_input import reply_to
from tests.jobs.gateway.test_main_path import client_of
from tests.waiting import wait_until
from tests.worker.site import Site

KEYS = '[tenants.a]\nkeys = ["ka"]\nfiles_bytes = 3000\n[tenants.b]\nkeys = ["kb"]\n'
# A form whose connection broke in the middle of its file, with the length that came.
CUT = (
    b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n{"half'
)


def raw(reply: Any) -> Any:
    """The JSON of a reply, as it was sent."""
    return reply.http_response.json()


def left_in(folder: Path) -> list[str]:
    """All paths below a folder that are files."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_files_are_those_of_openais_client(site: Site, start: Start, tmp_path: Path) -> None:
    both = [client_of(start().url) for _ in range(2)]
    client, other = both
    content = os.urandom(3 * 2**20)
    before = int(time.time())
    made = client.files.with_raw_response.create(
        file=("../in put.jsonl", content),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 7200},
    )
    FileObject.model_validate(raw(made), strict=True)
    file = made.parse()
    assert (file.filename, file.bytes, file.purpose) == ("in put.jsonl", len(content), "batch")
    assert file.expires_at == file.created_at + 7200 and before <= file.created_at <= time.time()
    later = [client.files.create(file=b"x" * n, purpose="user_data") for n in range(5)]
    assert later[0].expires_at is None
    thirty_days = client.files.create(file=b"{}", purpose="batch")
    assert thirty_days.expires_at == thirty_days.created_at + 30 * 24 * 3600

    got = other.files.with_raw_response.retrieve(file.id)
    assert raw(got) == raw(made)
    assert other.files.content(file.id).read() == content
    assert other.files.content(later[0].id).read() == b""

    listed = other.files.with_raw_response.list()
    assert set(raw(listed)) == {"object", "data", "first_id", "last_id", "has_more"}
    newest = [thirty_days.id, *(one.id for one in reversed(later)), file.id]
    assert [one.id for one in listed.parse().data] == newest
    assert [one.id for one in other.files.list(limit=2)] == newest  # the client pages
    page = other.files.list(limit=3, order="asc", after=file.id)
    assert [one.id for one in page.data] == [one.id for one in later[:3]] and page.has_more
    assert [one.id for one in client.files.list(purpose="batch")] == [thirty_days.id, file.id]

    deleted = client.files.with_raw_response.delete(file.id)
    FileDeleted.model_validate(raw(deleted), strict=True)
    for call in (other.files.retrieve, other.files.content, other.files.delete):
        with pytest.raises(openai.NotFoundError) as gone:
            call(file.id)
        assert gone.value.code == "not_found" and gone.value.param == "id"
    assert site.results.runs() == []  # the folder of files is none of a run
    assert len(left_in(site.folder)) == 2 * (len(later) + 1)


@pytest.mark.parametrize(
    "id", ["..", "%2e%2e%2f%2e%2e", "file-..", "..%2ffile.json", "file-" + "0" * 27]
)
def test_an_id_that_is_none_leads_to_no_path(site: Site, start: Start, id: str) -> None:
    gateway = start()
    site.folder.mkdir(exist_ok=True)
    (site.folder / "secret").write_text("secret")
    with gateway.http() as http:
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/content")):
            request = f"{method} /v1/files/{id}{path} HTTP/1.1\r\nhost: localhost\r\n"
            status, error = reply_to(gateway, f"{request}connection: close\r\n\r\n".encode())
            assert status == 404 and error["code"] in ("not_found", "unknown_url")
        assert http.get("/v1/files", params={"after": "../x"}).status_code == 400
    assert left_in(site.folder) == ["secret"]


def test_an_id_with_a_path_to_a_file_of_another_tenant_is_none(tmp_path: Path) -> None:
    """Such an id may come in a body, where nothing has split it at its slashes."""
    mine, other = FileStore(tmp_path, "a"), FileStore(tmp_path, "b")
    with mine.unfinished() as path:
        (path / DATA).write_bytes(b"x")
        file = mine.add(path, "x", "batch", None, None)
    for id in (f"../a/{file.id}", str(mine.folder / file.id), f"./{file.id}"):
        for call in (other.get, other.open, other.delete, mine.get):
            with pytest.raises(HttpError, match="no file"):
                call(id)
    assert mine.get(file.id) == file


def test_a_file_above_the_limit_is_refused_and_not_kept(site: Site, start: Start) -> None:
    gateway = start()
    small = start("--max-file", "2000")
    with gateway.http() as http:
        large = bytes(200 * 2**20 + 1)
        declared = http.post("/v1/files", files={"file": ("x", large)}, data={"purpose": "batch"})
    with small.http() as http:
        form: Any = {"files": {"file": ("x", bytes(2001))}, "data": {"purpose": "batch"}}
        request = http.build_request("POST", "/v1/files", **form)
        parts = (bytes([byte]) for byte in request.read())
        headers = {"content-type": request.headers["content-type"]}
        chunked = http.post("/v1/files", content=parts, headers=headers)
        form["files"] = {"file": ("x", bytes(2000))}
        assert http.post("/v1/files", **form).status_code == 200
    for reply in (declared, chunked):
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
        assert "--max-file" in reply.text and reply.headers["x-should-retry"] == "false"
    assert len(left_in(site.folder)) == 2


def test_a_wrong_form_is_refused_and_leaves_nothing(site: Site, start: Start) -> None:
    gateway = start()
    with gateway.http() as http:

        def post(param: str | None, **form: Any) -> None:
            reply = http.post("/v1/files", **form)
            assert reply.status_code in (400, 415), reply.text
            assert reply.json()["error"]["param"] == param

        file: Any = {"file": ("x", b"{}")}
        batch = {"purpose": "batch"}
        kind = {"content-type": "multipart/form-data; boundary=x"}
        post(None, json={"purpose": "batch"})
        post(None, content=b"x", headers={"content-type": "multipart/form-data"})
        post("file", content=b"no form", headers=kind)
        post("file", content=b'--x\r\ncontent-disposition: form-data; name="a"', headers=kind)
        post("file", content=CUT, headers=kind)
        post("file", files={"other": ("x", b"{}")}, data=batch)
        post("file", files={"a": (None, "x" * 100_000), **file}, data=batch)
        post("file", files=[("file", ("x", b"")), ("file", ("y", b""))], data=batch)
        post("file", files={"file": ("x\x7f", b"{}")}, data=batch)
        post("purpose", files=file)
        post("purpose", files=file, data={"purpose": "evals"})
        post("colour", files=file, data={**batch, "colour": "red"})
        for seconds in ("3599", "2592001", "x", ""):
            expiry = {"expires_after[anchor]": "created_at", "expires_after[seconds]": seconds}
            post("expires_after", files=file, data={**batch, **expiry})
        ended = b'--x\r\ncontent-disposition: form-data; name="a"\r\n\r\n\r\n--x--\r\n'
        post("file", content=ended + b"y" * 100_000, headers=kind)  # as if it had no end
        numbers = ("0", "10001", "²", "0" * 8 + "110001", "0" * 8 + "1" * 5000)
        for query in (*({"limit": one} for one in numbers), {"order": "up"}):
            (param,) = query
            reply = http.get("/v1/files", params=query)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert left_in(site.folder) == []
    assert "multipart" not in gateway.output  # a mistake of a client is no fault of the gateway


def test_tenants_have_their_own_files_and_quotas(site: Site, start: Start, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    url = start("--api-key-file", str(keys)).url
    a, b = client_of(url, "ka"), client_of(url, "kb")
    first = a.files.create(file=bytes(2000), purpose="batch")
    with pytest.raises(openai.RateLimitError) as full:
        a.files.create(file=bytes(1001), purpose="batch")
    assert full.value.code == "insufficient_quota"
    assert full.value.response.headers["x-should-retry"] == "false"
    second = a.files.create(file=bytes(1000), purpose="batch")
    assert b.files.create(file=bytes(3001), purpose="batch")
    for call in (b.files.retrieve, b.files.content, b.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(first.id)
    assert {one.id for one in a.files.list()} == {first.id, second.id}
    assert len(list(b.files.list())) == 1
    a.files.delete(first.id)
    a.files.create(file=bytes(2000), purpose="batch")


def test_a_file_that_has_expired_is_gone_and_is_removed(tmp_path: Path) -> None:
    store = FileStore(tmp_path, None)
    for seconds in (0, 3600):
        with store.unfinished() as path:
            (path / DATA).write_bytes(b"x")
            file = store.add(path, "x", "batch", seconds, None)
        assert (store.folder / file.id).is_dir()
    assert [one.id for one in store.listed(Page(None, 10), None)[0]] == [file.id]
    store.sweep()
    assert left_in(store.folder) == [f"{file.id}/{DATA}", f"{file.id}/{FACTS}"]


def test_a_gateway_removes_what_has_expired(site: Site, start: Start) -> None:
    store = FileStore(site.folder, "a")
    with store.unfinished() as path:
        (path / DATA).write_bytes(b"x")
        file = store.add(path, "x", "batch", 0, None)
    start()
    wait_until(lambda: not (store.folder / file.id).exists())


def test_a_damaged_file_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = FileStore(tmp_path, None)
    with store.unfinished() as path:
        (path / DATA).write_bytes(b"x")
        file = store.add(path, "x", "batch", None, None)
    facts = store.folder / file.id / FACTS
    content = json.loads(facts.read_bytes())
    for damaged in ("{", "[]", "{}", json.dumps({**content, "expires_at": "never"})):
        facts.write_text(damaged)
        with pytest.raises(HttpError, match="no file"):
            store.get(file.id)
        assert store.listed(Page(None, 10), None) == ([], False)
        store.sweep()
        assert "is damaged" in caplog.text
        caplog.clear()


def test_ids_sort_by_creation() -> None:
    first = new_id(FILE)
    time.sleep(0.002)
    assert first < new_id(FILE) and is_id(FILE, first) and not is_id("batch_", first)


def test_a_full_disk_is_said_and_leaves_no_half_file(site: Site, start: Start) -> None:
    gateway = start()
    pid = gateway._process.pid
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
    client = client_of(gateway.url)
    with pytest.raises(openai.InternalServerError) as full:
        client.files.create(file=bytes(3 * 2**20), purpose="batch")
    assert full.value.status_code == 507 and full.value.code == "insufficient_storage"
    assert left_in(site.folder) == []
    assert client.files.create(file=bytes(1000), purpose="batch").bytes == 1000


def test_what_a_killed_upload_leaves_is_removed(site: Site, start: Start) -> None:
    gateway = start()
    store = FileStore(site.folder, None)
    head = (
        "POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9000\r\n"
        "content-type: multipart/form-data; boundary=x\r\n\r\n"
        '--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\nabc'
    )
    with gateway.connect() as connection:
        connection.sendall(head.encode())
        wait_until(lambda: list((store.folder / UNFINISHED).glob("*/*")))
        (left,) = (store.folder / UNFINISHED).iterdir()
        old = time.time() - 2 * LEFT_SECONDS
        os.utime(left, (old, old))
        store.sweep()
        assert left.is_dir()  # somebody writes it
        gateway._process.send_signal(signal.SIGKILL)
        gateway.wait()
    store.sweep()
    assert left_in(store.folder) == [] and not left.exists()


def test_another_folder_than_that_of_the_workers_is_refused(
    site: Site, start: Start, tmp_path: Path
) -> None:
    site.worker()
    site.wait_for_workers()
    wrong = start("--results", str(tmp_path / "other"))
    reply: httpx2.Response
    with wrong.http() as http:
        form: Any = {"files": {"file": ("x", b"")}, "data": {"purpose": "batch"}}
        reply = http.post("/v1/files", **form)
        assert reply.status_code == 500 and "another results folder" in reply.text
    wait_until(lambda: str(site.folder) in wrong.output)
    assert not (tmp_path / "other").exists()
