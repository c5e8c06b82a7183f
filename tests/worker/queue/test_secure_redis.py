"""A job from submit to row on a Redis behind TLS, with users of minimal permissions."""

from __future__ import annotations

import asyncio
import re
import select
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import redis
import trustme
from click.testing import CliRunner
from rq.command import send_shutdown_command

from jobs import AsyncClient, Client, JobError, keys
from jobs.cli import build
from jobs.embedded import EmbeddedRedis
from jobs.record.process import record
from jobs.store.rights import COMMANDS
from tests.listener import Listener
from tests.worker.fake_backend import text_of
from tests.worker.site import PATIENCE, ROOT, Site, wait_until

PASSWORD = "p@ss/w:rd"
IN_URL = "p%40ss%2Fw%3Ard"
ALL = ("~*", "&*", "+@all")
USERS = re.findall(
    r"^    ACL SETUSER (\S+) +on >\S+ (.+)$",
    (ROOT / "docs/operations.md").read_text(),
    re.MULTILINE,
)


def tls_proxy(target: int, certificate: trustme.LeafCert) -> Listener:
    """Terminates TLS in front of a plain port, as stunnel does. One thread serves both directions
    of a connection: two may not use a TLS socket at once."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)

    def serve(plain: socket.socket) -> None:
        with (
            context.wrap_socket(plain, server_side=True) as outside,
            socket.create_connection(("127.0.0.1", target)) as inside,
        ):
            other = {outside: inside, inside: outside}
            while True:
                ready = [outside] if outside.pending() else select.select([*other], [], [])[0]
                for source in ready:
                    data = source.recv(65536)
                    if not data:
                        return
                    other[source].sendall(data)

    return Listener(serve)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def locked() -> Iterator[EmbeddedRedis]:
    """A server without access for the default user."""
    with EmbeddedRedis(port=0) as started:
        with redis.Redis.from_url(started.url) as default:
            default.execute_command("ACL", "SETUSER", "admin", "on", f">{PASSWORD}", *ALL)
            default.execute_command("ACL", "SETUSER", "default", "off")
        yield started


@pytest.fixture
def server(locked: EmbeddedRedis) -> EmbeddedRedis:
    """That server, empty, with the documented users."""
    with redis.Redis.from_url(locked.url, username="admin", password=PASSWORD) as admin:
        admin.flushall()
        for name, rights in [*USERS, ("stranger", "~mine:* +@all")]:
            words = ("reset", "on", f">{PASSWORD}", *rights.split())
            admin.execute_command("ACL", "SETUSER", name, *words)
    return locked


@pytest.fixture
def proxy(server: EmbeddedRedis, authority: trustme.CA) -> Iterator[Listener]:
    assert server.port is not None
    with closing(tls_proxy(server.port, authority.issue_cert("localhost"))) as running:
        yield running


@pytest.fixture
def trusted(authority: trustme.CA, tmp_path: Path) -> Path:
    path = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return path


def test_a_job_runs_over_tls_with_minimal_permissions(
    proxy: Listener, trusted: Path, tmp_path: Path
) -> None:
    at = f"localhost:{proxy.port}/0?ssl_ca_certs={trusted}"
    as_producer = f"rediss://producer:{IN_URL}@{at}"
    site = Site(as_producer, tmp_path / "results")
    as_worker = Site(f"rediss://worker:{IN_URL}@{at}", tmp_path / "results")
    jobs = site.submit_many(["one", "two", "three"], words=20)
    doomed = site.submit("four", words=100_000)
    worker = as_worker.worker()
    doomed.cancel()
    for job in jobs:
        assert "".join(chunk.text for chunk in job.stream()) == text_of(job.request)

    async def follow() -> str:
        async with AsyncClient(as_producer) as client:
            return "".join([chunk.text async for chunk in client.job(jobs[0].id).stream()])

    assert asyncio.run(follow()) == text_of(jobs[0].request)
    with pytest.raises(JobError) as caught:
        doomed.result(timeout=PATIENCE)
    assert caught.value.code == "cancelled"
    assert worker.stop() == 0
    assert PASSWORD not in worker.output
    assert "CLIENT LIST" not in worker.output  # RQ warns if it may not call it
    assert {row["status"] for row in site.rows()} == {"ok", "cancelled"}
    as_worker.close()


def test_a_producer_cannot_end_or_pause_a_worker(server: EmbeddedRedis, tmp_path: Path) -> None:
    at = f"127.0.0.1:{server.port}/0"
    site = Site(f"redis://producer:{IN_URL}@{at}", tmp_path / "results")
    as_worker = Site(f"redis://worker:{IN_URL}@{at}", tmp_path / "results")
    worker = as_worker.worker()
    as_worker.wait_for_workers()
    (name,) = (found.decode() for found in site.redis.zrange(keys.WORKERS, 0, -1))
    with pytest.raises(redis.exceptions.NoPermissionError, match="channel"):
        send_shutdown_command(site.redis, name)
    url = f"redis://{{}}:{IN_URL}@{at}"
    words = ("workers", "resume", name, "--json", "--redis")
    refused = CliRunner().invoke(build(), [*words, url.format("producer")])
    assert refused.exit_code == 3
    assert "(Users) lists those of workers, operators and producers" in refused.stderr
    resumed = CliRunner().invoke(build(), [*words, url.format("operator")])
    assert (resumed.exit_code, '"state":"claiming"' in resumed.stdout) == (0, True), resumed.output
    assert site.submit("hello").result(timeout=PATIENCE).text
    send_shutdown_command(as_worker.redis, name)
    assert worker.wait() == 0
    site.close()
    as_worker.close()


TO_WORKERS = [
    *("workers pause NAME", "workers drain NAME", "workers resume NAME"),
    *("workers pause --all", "workers resume --all"),
    *("models load two", "models pin two", "models unpin two", "models unload two"),
    *("models pull two --worker NAME",),
]
OF_JOBS = [
    *("status", "status --json", "models list", "limits", "limits jobs=9", "jobs list"),
    *("jobs show first", "cancel first", "jobs requeue first", "jobs cancel --all"),
    *("jobs purge --all", "results rm done --yes --results DIR"),
]


def test_an_operator_may_do_all_that_the_guide_gives_it_and_others_are_refused_in_one_sentence(
    server: EmbeddedRedis, tmp_path: Path
) -> None:
    at = f"127.0.0.1:{server.port}/0"
    url = f"redis://{{}}:{IN_URL}@{at}"
    site = Site(url.format("producer"), tmp_path / "results")
    as_worker = Site(url.format("worker"), tmp_path / "results")
    as_worker.worker(models=["one", "two"], budget=300, lease_seconds=30.0)
    site.wait_for_workers()
    (name,) = (found.decode() for found in site.redis.zrange(keys.WORKERS, 0, -1))
    site.submit("hello", model="one", run="done").result(timeout=PATIENCE)
    wait_until(lambda: "done" in site.results.runs())
    site.submit("hello", model="nobody", id="first")

    def run(user: str, command: str) -> tuple[int, str]:
        places = {"NAME": name, "DIR": str(tmp_path / "results")}
        words = [places.get(word, word) for word in command.split()]
        done = CliRunner().invoke(build(), [*words, "--redis", url.format(user)])
        assert "Traceback" not in done.output and PASSWORD not in done.output
        return done.exit_code, done.stderr

    for command in TO_WORKERS:
        for user in ("producer", "acme"):
            code, error = run(user, command)
            assert (code, error.count("\n")) == (3, 1), (command, error)
            assert f"the user '{user}' lacks a right: docs/operations.md (Users)" in error
    for command in ("cancel first", "jobs show first", "jobs cancel --all", "status"):
        code, error = run("acme", command)
        assert (code, error.count("\n")) == (3, 1), (command, error)
    assert site.client.job("first").status() == "queued"
    for command in [*TO_WORKERS, *OF_JOBS]:
        code, error = run("operator", command)
        if "pull" in command:  # the worker's answer: such models come from no hub
            assert code != 3 or "lacks a right" not in error
        else:
            assert code == 0, (command, error)
    for one in (site, as_worker):
        one.close()


def test_a_tenant_s_user_runs_its_jobs_and_reads_no_content_of_others(
    server: EmbeddedRedis, tmp_path: Path
) -> None:
    at = f"127.0.0.1:{server.port}/0"
    others, tenant, as_worker = (
        Site(f"redis://{user}:{IN_URL}@{at}", tmp_path / "results")
        for user in ("producer", "acme", "worker")
    )
    theirs = others.submit("secret", id="other-1", run="other-r")
    waits = tenant.submit("three", id="acme-3", tenant="acme", run="acme-r", first_row=3)
    waits.cancel()
    ours = tenant.submit("one", id="acme-1", tenant="acme", run="acme-r", ttl=3600)
    doomed = tenant.submit("two", id="acme-2", words=100_000, run="acme-r", first_row=2)
    worker = as_worker.worker(part_seconds=3600.0)
    assert "".join(chunk.text for chunk in ours.stream()) == text_of(ours.request)
    assert ours.result(timeout=PATIENCE).text == text_of(ours.request)
    wait_until(lambda: doomed.status().value == "started")
    doomed.cancel()
    wait_until(lambda: doomed.status().over and theirs.status().over)
    for command in (
        "HGETALL rq:job:other-1",
        "HSET rq:job:other-1 data x",
        "XRANGE chatjobs:{other-1}:log - +",
        "XRANGE rq:results:other-1 - +",
        "XRANGE chatjobs:outbox:other-r - +",
        "XADD chatjobs:outbox:other-r * entry x",
        "LRANGE chatjobs:{other-s}:turns 0 -1",
        "GET chatjobs:results",
    ):
        with pytest.raises(redis.exceptions.NoPermissionError):
            tenant.redis.execute_command(*command.split())
        others.redis.execute_command(*command.split())  # as the documentation says of producers
    with pytest.raises(JobError, match="refused a command"):
        tenant.client.job("other-1").result(timeout=1)
    worker.kill()
    for site in (others, tenant, as_worker):
        site.close()


@pytest.mark.parametrize("user", [name for name, _ in USERS])
@pytest.mark.parametrize(
    "command",
    [
        *("FLUSHALL", "KEYS *", "CONFIG SET maxmemory 1", "ACL LIST", "REPLICAOF NO ONE"),
        *("GET other", "SET other x", "PUBLISH other x", "SUBSCRIBE other"),
    ],
)
def test_users_may_not_do_what_jobs_do_not_need(
    server: EmbeddedRedis, user: str, command: str
) -> None:
    with (
        redis.Redis.from_url(f"redis://{user}:{IN_URL}@127.0.0.1:{server.port}/0") as client,
        pytest.raises(redis.exceptions.NoPermissionError),
    ):
        client.execute_command(*command.split())


def test_a_connection_error_is_one_sentence(
    proxy: Listener, trusted: Path, server: EmbeddedRedis
) -> None:
    ca = f"?ssl_ca_certs={trusted}"
    for url, reason in (
        (f"rediss://producer:{IN_URL}@localhost:{proxy.port}/0", "certificate verify failed"),
        (f"rediss://producer:wrong@localhost:{proxy.port}/0{ca}", "refused the login"),
        (f"redis://nobody:x@127.0.0.1:{server.port}/0", "refused the login"),
        (f"redis://127.0.0.1:{server.port}/0", "refused the login"),
        (f"redis://stranger:{IN_URL}@127.0.0.1:{server.port}/0", "refused a command: "),
    ):
        with Client(url) as client, pytest.raises(JobError) as caught:
            client.submit({"model": "fake", "messages": [{"role": "user", "content": "hi"}]})
        assert reason in caught.value.message
        assert "\n" not in caught.value.message
        assert "wrong@" not in caught.value.message


LACKING = [
    ("producer", "", "&rq:*"),
    ("worker", "-hset -xadd", "+hset +xadd"),
    ("worker", "resetkeys ~chatjobs:*", "~rq:*"),
    ("worker", "resetkeys ~rq:*", "~chatjobs:*"),
    ("worker", "resetchannels &rq:*", "&chatjobs:*"),
    ("worker", "-subscribe", "+subscribe"),
]


@pytest.mark.filterwarnings("ignore:CLIENT LIST")  # of RQ, which a producer may not send
@pytest.mark.parametrize(("user", "changes", "rights"), LACKING)
def test_a_worker_names_the_rights_that_its_user_lacks_at_start(
    server: EmbeddedRedis, tmp_path: Path, user: str, changes: str, rights: str
) -> None:
    with redis.Redis.from_url(server.url, username="admin", password=PASSWORD) as admin:
        admin.execute_command("ACL", "SETUSER", user, *changes.split())
        site = Site(f"redis://{user}:{IN_URL}@127.0.0.1:{server.port}/0", tmp_path / "results")
        with pytest.raises(JobError) as caught:
            site.burst()
        message = caught.value.message
        assert f"the Redis user '{user}' lacks rights that a worker needs ({rights})" in message
        assert PASSWORD not in message
        remedy = re.search(r"\(ACL (SETUSER .+?)\), or", message)
        assert remedy is not None
        admin.execute_command("ACL", *remedy[1].split())
    site.burst()
    site.close()


def test_a_worker_without_its_rights_ends(server: EmbeddedRedis, tmp_path: Path) -> None:
    site = Site(f"redis://producer:{IN_URL}@127.0.0.1:{server.port}/0", tmp_path / "results")
    refused = site.worker()
    assert refused.wait() == 3
    assert "the Redis user 'producer' lacks rights that a worker needs (&rq:*)" in refused.output
    assert "serves" not in refused.output
    assert PASSWORD not in refused.output
    site.close()


RUN_BY_CLIENTS_ALONE = {
    *("enqueue", "requeue", "purge", "keep_response"),
    *("session_create", "session_cut", "session_replace"),
}


def test_every_command_of_the_scripts_of_workers_is_tried_at_start() -> None:
    tried = {command.split()[0] for command in COMMANDS}
    scripts = ROOT.glob("jobs/store/scripts/*.lua")
    texts = [path.read_text() for path in scripts if path.stem not in RUN_BY_CLIENTS_ALONE]
    assert len(texts) > 20
    sent = {name for text in texts for name in re.findall(r"redis\.p?call\('(\w+)'", text)}
    assert sent - tried == set()


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("rediss://producer:{password}@localhost:{plain}/0", "write redis://"),
        ("redis://producer:{password}@localhost:{tls}/0", "write rediss://"),
        ("redis://localhost:{plain}/0", "give the user and the password in the URL"),
        ("redis://:wrong@localhost:{plain}/0", "check the user and the password"),
        ("redis://producer:wrong@localhost:{plain}/0", "check the user and the password"),
        ("redis://producer:{password}@localhost:{plain}/99", "no database 99: name another one"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_url_is_named_at_start(
    proxy: Listener, server: EmbeddedRedis, url: str, remedy: str
) -> None:
    url = url.format(password=IN_URL, plain=server.port, tls=proxy.port)
    result = CliRunner().invoke(build(), ["status", "--redis", url])
    assert result.exit_code == 3
    assert remedy in result.stderr
    assert result.stderr.count("\n") == 1
    assert "wrong@" not in result.output


@pytest.mark.parametrize("words", [["work", "--model", "demo"], ["jobs", "list"]])
def test_each_command_says_what_is_wrong_with_a_url(
    server: EmbeddedRedis, words: list[str]
) -> None:
    url = f"redis://producer:wrong@localhost:{server.port}/0"
    result = CliRunner().invoke(build(), [*words, "--redis", url])
    assert result.exit_code == 3
    assert "check the user and the password" in result.stderr
    assert result.stderr.count("\n") == 1
    assert "wrong@" not in result.output


def test_a_certificate_that_is_not_trusted_gets_a_hint_about_tls(proxy: Listener) -> None:
    url = f"rediss://producer:{IN_URL}@localhost:{proxy.port}/0"
    result = CliRunner().invoke(build(), ["status", "--redis", url])
    assert result.exit_code == 3
    assert f"TLS with Redis at localhost:{proxy.port} failed" in result.stderr
    assert "?ssl_ca_certs=FILE" in result.stderr
    assert "start Redis" not in result.stderr


def test_what_is_wrong_with_a_certificate_is_named(
    server: EmbeddedRedis, authority: trustme.CA, trusted: Path, tmp_path: Path
) -> None:
    long_ago = datetime.now(UTC) - timedelta(days=9)
    (tmp_path / "no.pem").write_text("not a certificate")
    assert server.port is not None
    for certificate, options, remedy in (
        (
            authority.issue_cert("localhost", not_before=long_ago, not_after=long_ago),
            f"ssl_ca_certs={trusted}",
            "expired .+; replace the server's certificate, or set the clock",
        ),
        (
            authority.issue_cert("redis.example"),
            f"ssl_ca_certs={trusted}",
            "Hostname mismatch.+; name the host in the URL as the server's certificate does",
        ),
        (
            authority.issue_cert("localhost"),
            f"ssl_ca_certs={tmp_path / 'no.pem'}",
            "; ssl_ca_certs in the URL must name a file with certificates in PEM",
        ),
        (
            authority.issue_cert("localhost"),
            f"ssl_ca_certs={trusted}&ssl_certfile={trusted}",
            "; ssl_certfile and ssl_keyfile in the URL must name a certificate and its key",
        ),
    ):
        with closing(tls_proxy(server.port, certificate)) as proxy:
            url = f"rediss://localhost:{proxy.port}/0?{options}"
            result = CliRunner().invoke(build(), ["status", "--redis", url])
        assert result.exit_code == 3
        assert re.search(remedy, result.stderr), result.stderr
        assert result.stderr.count("\n") == 1


def test_a_missing_file_of_an_authority_is_not_a_missing_server(proxy: Listener) -> None:
    url = f"rediss://localhost:{proxy.port}/0?ssl_ca_certs=/nope.pem"
    result = CliRunner().invoke(build(), ["status", "--redis", url])
    assert result.exit_code == 3
    fault = "can't read /nope.pem, which ssl_ca_certs in the URL names: No such file or directory"
    assert fault in result.stderr
    assert "start Redis" not in result.stderr


def test_a_recorder_needs_a_producer_s_rights_and_names_those_that_are_missing(
    server: EmbeddedRedis, tmp_path: Path
) -> None:
    url = f"redis://producer:{IN_URL}@127.0.0.1:{server.port}/0"
    record(redis_url=url, results=tmp_path / "results", once=True)
    with redis.Redis.from_url(server.url, username="admin", password=PASSWORD) as admin:
        admin.execute_command("ACL", "SETUSER", "producer", "-xdel", "-publish")
    with pytest.raises(JobError) as caught:
        record(redis_url=url, results=tmp_path / "results", once=True)
    lacks = "the Redis user 'producer' lacks rights that a recorder needs (+xdel +publish)"
    assert lacks in caught.value.message
