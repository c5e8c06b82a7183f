"""API keys and what belongs to a tenant."""

from __future__ import annotations

import hashlib
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
HASH = hashlib.sha256(b"third").hexdigest()
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
    for broken in ("not toml", "[tenants.a]\nkeys = []", None):
        file.unlink() if broken is None else file.write_text(broken)
        assert keys.tenant_of("Bearer first") is before
        assert "stay in use" in caplog.text
        caplog.clear()
    file.write_text('[tenants.a]\nkeys = ["new"]\n')
    assert keys.tenant_of("Bearer new") is before
    with pytest.raises(HttpError):
        keys.tenant_of("Bearer first")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "each tenant has a table"),
        ("x", "not TOML"),
        ('[tenants."a b"]\nkeys = ["x"]', "a name has"),
        ('[tenants.a]\nkey = "x"', "unknown field 'key'"),
        ("[tenants.a]\n", "needs keys"),
        ('[tenants.a]\nkeys = [""]', "a text without spaces"),
        ('[tenants.a]\nkeys = ["x"]\nopen = 0', "at least 1"),
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
