"""API keys and what belongs to a tenant."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from jobs.errors import InvalidRequest, JobError
from jobs.gateway import tenants
from jobs.gateway.failures import HttpError
from jobs.gateway.settings import Settings
from jobs.gateway.tenants import ApiKeys, Tenant
from jobs.testing import FakeWorker
from tests.jobs.gateway.in_process import send

PATH = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
HASH = hashlib.sha256(b"third").hexdigest().upper()
KEYS = f'[tenants.a]\nkeys = ["first", "second"]\nopen = 1\n[tenants.b]\nkeys = ["sha256:{HASH}"]\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    return path


def test_a_key_is_that_of_a_tenant(file: Path) -> None:
    keys = ApiKeys(file)
    assert keys.tenant_of("Bearer first") is keys.tenant_of("bearer second")
    assert keys.tenant_of("Bearer third").name == "b"
    for wrong in (None, "", "Bearer", "Bearer fourth", "first", "Basic first", f"Bearer {HASH}"):
        with pytest.raises(HttpError) as error:
            keys.tenant_of(wrong)
        assert error.value.status == 401


def test_a_changed_file_is_read_without_a_restart_and_a_broken_one_is_not(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tenants, "LOOK_SECONDS", 0.0)
    keys = ApiKeys(file)
    before = keys.tenant_of("Bearer first")
    deep, number = f"x = {'[' * 10_000}", f"x = {'9' * 5000}"
    for broken in ("not toml", "[tenants.a]\nkeys = []", deep, number, None):
        file.unlink() if broken is None else file.write_text(broken)
        for _ in range(2):
            assert keys.tenant_of("Bearer first") is before
        assert len(caplog.messages) == 1 and "stay in use" in caplog.text
        caplog.clear()
    os.mkfifo(file)
    assert keys.tenant_of("Bearer first") is before  # it does not wait for the other end
    file.unlink()
    file.write_text('[tenants.a]\nkeys = ["new"]\n')
    assert keys.tenant_of("Bearer new") is before
    with pytest.raises(HttpError):
        keys.tenant_of("Bearer first")
    times = file.stat()
    file.write_text('[tenants.a]\nkeys = ["now"]\n')  # of the same size
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # and time, as a copy may have
    assert keys.tenant_of("Bearer now") is before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "each tenant has a table"),
        ("x", "not TOML"),
        ('[tenants."a b"]\nkeys = ["x"]', "a name has"),
        ('[tenants.a]\nkey = "x"', "unknown field 'key'"),
        ("[tenants.a]\n", "needs keys"),
        ('[tenants.a]\nkeys = [""]', "printable ASCII"),
        ('[tenants.a]\nkeys = [" x"]', "no spaces around"),
        ('[tenants.a]\nkeys = ["clé"]', "printable ASCII"),  # no header carries it unchanged
        ('[tenants.a]\nkeys = ["x\\ny"]', "printable ASCII"),
        (f'{KEYS}[tenants.c]\nkeys = ["third"]', "'b' and 'c' have the same key"),
        ('[tenants.a]\nkeys = ["x"]\nopen = 0', "at least 1"),
        ('[tenants.a]\nkeys = ["sha256:abcd"]', "64 hexadecimal digits"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=message):
        ApiKeys(path)


def test_the_jobs_of_a_tenant_have_its_name() -> None:
    tenant = Tenant("a")
    claimed = tenant.claim({**BODY, "job": {"run": "r", "session": "s", "id": "x"}})
    assert claimed["job"] == {"run": "a.r", "session": "a:s", "id": "x", "tenant": "a"}
    assert claimed["cache_salt"] == "a:"
    assert tenant.owns(claimed) and not Tenant("b").owns(claimed) and Tenant().owns(claimed)
    assert not tenant.owns(BODY)
    with pytest.raises(InvalidRequest, match=r"job\.tenant"):
        tenant.claim({**BODY, "job": {"tenant": "b"}})
    assert Tenant().claim(BODY) == BODY


def test_a_tenant_has_so_many_open_requests() -> None:
    tenant = Tenant("a", 1)
    with tenant.opened(), pytest.raises(HttpError) as error, tenant.opened():
        pass
    assert error.value.status == 429 and "retry-after" in error.value.headers
    with tenant.opened():
        pass


def test_requests_need_a_key_and_see_their_own_jobs_only(file: Path) -> None:
    settings = {"api_key_file": file}
    with FakeWorker("Hello") as worker:

        def ask(key: str | None, method: str, path: str, **call: Any) -> Any:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            return send(worker, method, path, settings=settings, headers=headers, **call)

        assert ask(None, "GET", "/health").status_code == 200
        assert ask(None, "GET", "/v1/models").status_code == 401
        wrong = ask("wrong", "POST", PATH, json=BODY)
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "invalid_api_key")
        job = ask("first", "POST", PATH, json=BODY).headers["x-request-id"]
        assert worker.requests[0].job.tenant == "a"
        for path in (f"{PATH}/{job}", f"{PATH}/{job}/stream"):
            assert ask("second", "GET", path).status_code == 200
            assert ask("third", "GET", path).status_code == 404


def test_other_addresses_need_keys() -> None:
    settings: dict[str, Any] = {"redis_url": "", "results": Path("r")}
    for host in ("0.0.0.0", "::", "192.168.0.1", "example.org"):
        with pytest.raises(JobError, match="no keys are set"):
            Settings(**settings, host=host).check()
        Settings(**settings, host=host, api_key_file=Path("f")).check()
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        Settings(**settings, host=host).check()


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]:8000"])
def test_a_gateway_without_keys_is_called_by_names_of_this_machine(host: str) -> None:
    with FakeWorker("Hello") as worker:
        reply = send(worker, "POST", PATH, json=BODY, headers={"host": host})
        assert reply.status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example:80", "127.0.0.1.evil.example", "10.0.0.1"]
)
def test_a_site_that_rebinds_its_name_is_refused(file: Path, host: str) -> None:
    with FakeWorker("Hello") as worker:
        for path in ("/health", "/v1/models", "/v1/nothing"):
            reply = send(worker, "GET", path, headers={"host": host})
            assert (reply.status_code, reply.json()["error"]["code"]) == (403, "host_not_allowed")
            assert "x-request-id" in reply.headers
        assert send(worker, "POST", PATH, json=BODY, headers={"host": host}).status_code == 403
        assert worker.requests == []
        headers = {"host": host, "authorization": "Bearer first"}
        settings = {"api_key_file": file}
        assert (
            send(worker, "GET", "/v1/models", headers=headers, settings=settings).status_code == 200
        )
