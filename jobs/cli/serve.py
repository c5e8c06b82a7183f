"""`chatjobs serve`: OpenAI's HTTP API over the queue.

starlette, uvicorn and redis are imported inside the command, so that `--help` stays fast.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import click

from jobs.cli.failures import Unavailable, WrongInput
from jobs.cli.options import (
    check_server,
    log_format_option,
    make_results_option,
    quiet_option,
    redis_option,
)
from jobs.cli.stderr import keep_writing
from jobs.gateway.settings import MAX_BODY, MAX_CONNECTIONS, MAX_FILE, Settings
from jobs.log_lines import log_form, log_to_stderr

NEEDED = {
    "starlette": "starlette",
    "uvicorn": "uvicorn",
    "python_multipart": "python-multipart",
    "tokenizers": "tokenizers",
    "jinja2": "jinja2",
    "prometheus_client": "prometheus-client",
}
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: a free one."
)
@redis_option
@make_results_option(
    "Folder of the workers' results, on a disk that this machine shares: it has the uploaded files "
    "and the batches, and the page shows its runs."
)
@click.option(
    "--api-key-file",
    type=FILE,
    metavar="FILE",
    help="TOML file with the keys of each tenant; read again when it changes. Needed for any "
    "address that other machines reach.",
)
@click.option("--tls-cert", type=FILE, metavar="FILE", help="Certificate chain: serve HTTPS.")
@click.option("--tls-key", type=FILE, metavar="FILE", help="Its private key.")
@click.option(
    "--forwarded-allow-ips",
    metavar="IPS",
    help="Proxies whose X-Forwarded-* headers are believed, with commas between; '*': all.",
)
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    metavar="ORIGIN",
    help="Origin whose pages may call this API, such as https://app.example; repeatable.",
)
@click.option(
    "--max-body",
    type=click.IntRange(min=1024),
    default=MAX_BODY,
    show_default=True,
    metavar="BYTES",
    help="Largest body of a request.",
)
@click.option(
    "--max-file",
    type=click.IntRange(min=1024),
    default=MAX_FILE,
    show_default=True,
    metavar="BYTES",
    help="Largest file that is uploaded.",
)
@click.option(
    "--max-connections",
    type=click.IntRange(min=1),
    default=MAX_CONNECTIONS,
    show_default=True,
    metavar="N",
    help="Connections that may be open at the same time.",
)
@log_format_option
@quiet_option
def serve(
    host: str,
    port: int,
    redis_url: str,
    results: str,
    api_key_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    forwarded_allow_ips: str | None,
    cors_origins: tuple[str, ...],
    max_body: int,
    max_file: int,
    max_connections: int,
    log_format: str,
    quiet: bool,
) -> None:
    """Serve OpenAI's HTTP API over the queue: base_url="http://localhost:8000/v1".

    Needs workers, but no device and no model. Any number of these processes can serve one Redis:
    the state is there. After SIGTERM or Ctrl-C, open replies have 25 seconds to end; the jobs of
    those that don't go on, and another process continues their streams. docs/http.md lists the
    routes. Needs the extra 'gateway'.
    """
    missing = [package for module, package in NEEDED.items() if find_spec(module) is None]
    if missing:
        from jobs.install import command_for

        raise Unavailable(f"this command needs {', '.join(missing)}: {command_for('gateway')}")
    keep_writing()
    from jobs.errors import JobError
    from jobs.gateway.server import serve as run

    form = log_form(log_format)
    log_to_stderr(form, quiet=quiet)
    settings = Settings(
        redis_url=redis_url,
        results=Path(results),
        host=host,
        port=port,
        api_key_file=api_key_file,
        tls_cert=tls_cert,
        tls_key=tls_key,
        forwarded_allow_ips=forwarded_allow_ips,
        cors_origins=cors_origins,
        max_body=max_body,
        max_file=max_file,
        max_connections=max_connections,
        log_form=form,
        quiet=quiet,
    )
    try:
        settings.check()
    except JobError as error:
        raise WrongInput(error.message, error) from None
    check_server(redis_url)
    run(settings)
