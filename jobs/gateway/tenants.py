"""Who calls: tenants by their API keys, and what belongs to each of them.

Without a file of keys there is one nameless tenant, who may do everything. With one, the jobs of a
tenant take turns with those of others (`job.tenant`), and the names of its runs and sessions begin
with its own.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.errors import JobError, invalid
from jobs.gateway.failures import RETRY_SECONDS, HttpError
from jobs.sizes import counted

logger = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")  # without "." and ":", which end the name in others
SENDABLE = re.compile(r"[!-~]([ -~]*[!-~])?")  # what a header carries unchanged
HASH = "sha256:"  # begins the hash of a key in the place of the key
HASHED = re.compile(rf"{HASH}([0-9a-fA-F]{{64}})")
LIMITS = ("open", "responses", "files_bytes", "batches")
FIELDS = ("keys", *LIMITS)
LOOK_SECONDS = 1.0  # between two looks at the file


@dataclass(slots=True, eq=False)
class Tenant:
    """Who sends a request. `name`: None without keys. `limit`: of its open requests here.
    `responses`: that it may store. `files_bytes`: of its files. `batches`: that have not ended."""

    name: str | None = None
    limit: int | None = None
    files_bytes: int | None = None
    batches: int | None = None
    responses: int | None = None
    open: int = field(default=0, init=False)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """One request of the tenant is open. Raises HttpError 429 at the limit."""
        if self.limit is not None and self.open >= self.limit:
            raise HttpError(
                429,
                f"tenant {self.name!r} has {counted(self.open, 'open request')}, and its limit is "
                f"{self.limit}: wait until one has ended",
                "rate_limit_exceeded",
                kind="rate_limit_error",
                headers={"retry-after": str(RETRY_SECONDS)},
            )
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    def claim(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A request as a job of this tenant. Raises InvalidRequest for the name of another one."""
        if self.name is None:
            return dict(body)
        options = body.get("job")
        if options is not None and not isinstance(options, dict):
            return dict(body)  # the check of the request has the sentence
        options = dict(options or {})
        if options.get("tenant") not in (None, self.name):
            raise invalid(
                f"job.tenant: your key is that of {self.name!r}: remove the field", "job.tenant"
            )
        options["tenant"] = self.name
        for name, end in (("run", "."), ("session", ":")):
            if isinstance(options.get(name), str):
                options[name] = f"{self.name}{end}{options[name]}"
        salt = body.get("cache_salt")
        if salt is None or isinstance(salt, str):
            salt = f"{self.name}:{salt or ''}"  # nobody sees by times what others have sent
        return {**body, "job": options, "cache_salt": salt}

    def run_name(self, run: str) -> str | None:
        """A run by the name that this tenant gives it; None for the run of another one."""
        if self.name is None:
            return run
        return run.removeprefix(f"{self.name}.") if run.startswith(f"{self.name}.") else None

    def owns(self, request: Mapping[str, Any]) -> bool:
        """True if a job with this request, in JSON, is one of this tenant."""
        if self.name is None:
            return True
        options = request.get("job")
        return isinstance(options, dict) and options.get("tenant") == self.name


class ApiKeys:
    """The tenants of a file of keys, which is read again when it has changed.

        [tenants.acme]
        keys = ["sk-…", "sha256:…"]   # a key, or the SHA-256 of one in hexadecimal digits
        open = 50                     # requests that may be open at the same time
        files_bytes = 10_000_000_000  # of all its files
        batches = 20                  # that have not ended
        responses = 1000              # responses of /v1/responses that may be stored

    `path`: None for a gateway without keys. Raises InvalidRequest for a file that can't be used.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._anybody = Tenant()
        self._tenants: dict[str, Tenant] = {}
        self._hashes: list[tuple[bytes, Tenant]] = []
        self._version: tuple[int, ...] | None = None
        self._next_look = 0.0
        if path is not None:
            self._version = _version(path)
            self._use(_read(path))
            self._next_look = time.monotonic() + LOOK_SECONDS

    def tenant_of(self, authorization: str | None) -> Tenant:
        """The tenant with the key in this header. Raises HttpError 401."""
        if self._path is None:
            return self._anybody
        self._look(self._path)
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode()).digest()
        found: Tenant | None = None
        for known, tenant in self._hashes:  # each, so that the time says nothing about the key
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is not None and scheme.lower() == "bearer":
            return found
        problem = (
            "the API key is not one of this server"
            if authorization
            else "this server needs an API key: send the header authorization: Bearer KEY"
        )
        raise HttpError(401, problem, "invalid_api_key", headers={"www-authenticate": "Bearer"})

    def _look(self, path: Path) -> None:
        """Read the file again if it has changed. One that can't be used changes nothing."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        version = _version(path)
        if version == self._version:
            return
        self._version = version
        try:
            if version is None:
                raise invalid(f"{path} is no file that can be read")
            self._use(_read(path))
        except JobError as error:
            logger.warning("the keys that were read before stay in use: %s", error.message)
            return
        logger.info("read the keys of %d tenants from %s", len(self._tenants), path)

    def _use(self, found: dict[str, tuple[list[bytes], dict[str, int]]]) -> None:
        tenants = {}
        hashes = []
        for name, (digests, limits) in found.items():
            tenant = self._tenants.get(name) or Tenant(name)  # it may have open requests
            tenant.limit = limits.get("open")
            tenant.files_bytes = limits.get("files_bytes")
            tenant.batches = limits.get("batches")
            tenant.responses = limits.get("responses")
            tenants[name] = tenant
            hashes += [(digest, tenant) for digest in digests]
        self._tenants, self._hashes = tenants, hashes


def _version(path: Path) -> tuple[int, ...] | None:
    """What changes with the file; None if there is none, or a pipe, which would be waited for."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return found.st_ctime_ns, found.st_size, found.st_ino  # ctime: of its permissions as well


def _read(path: Path) -> dict[str, tuple[list[bytes], dict[str, int]]]:
    """The hashes of the keys of each tenant, and its limits. Raises InvalidRequest."""
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise invalid(f"{path}: {error.strerror}") from None
    except RecursionError:
        raise invalid(f"{path} is nested too deep") from None
    except ValueError as error:
        raise invalid(f"{path} is not TOML: {error}") from None
    tenants = content.get("tenants")
    if content.keys() - {"tenants"} or not isinstance(tenants, dict) or not tenants:
        raise invalid(f'{path}: each tenant has a table [tenants.NAME] with keys = ["…"]')
    found = {name: _tenant(f"{path}: tenant {name!r}", name, tenants[name]) for name in tenants}
    owners: dict[bytes, str] = {}
    for name, (digests, _) in found.items():
        for digest in digests:
            owner = owners.setdefault(digest, name)
            if owner != name:
                raise invalid(
                    f"{path}: tenants {owner!r} and {name!r} have the same key: give each its own"
                )
    return found


def _tenant(place: str, name: str, table: Any) -> tuple[list[bytes], dict[str, int]]:
    if not NAME.fullmatch(name):
        raise invalid(f"{place}: a name has 1 to 64 letters, digits, '_' and '-'")
    unknown = sorted(set(table).difference(FIELDS)) if isinstance(table, dict) else ["value"]
    if unknown:
        known = ", ".join(FIELDS)
        raise invalid(f"{place} has the unknown field {unknown[0]!r}; known fields: {known}")
    keys = table.get("keys")
    limits = {field: table[field] for field in LIMITS if field in table}
    if not isinstance(keys, list) or not keys:
        raise invalid(f'{place} needs keys = ["…"]')
    for one, limit in limits.items():
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise invalid(f"{place}: {one} must be an integer of at least 1")
    if not all(isinstance(key, str) and SENDABLE.fullmatch(key) for key in keys):
        raise invalid(f"{place}: a key has printable ASCII characters, and no spaces around them")
    if any(key.startswith(HASH) and not HASHED.fullmatch(key) for key in keys):
        raise invalid(f"{place}: {HASH} must be followed by the 64 hexadecimal digits of a hash")
    return [_digest(key) for key in keys], limits


def _digest(key: str) -> bytes:
    hashed = HASHED.fullmatch(key)
    return bytes.fromhex(hashed[1]) if hashed else hashlib.sha256(key.encode()).digest()
