"""The pip command that adds an extra of chatjobs to this environment, for error messages.

The package may come from an index, a clone, a wheel or a repository. pip records which
(direct_url.json, PEP 610), and the command installs from there again.
"""

from __future__ import annotations

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


def command_for(extra: str) -> str:
    """The command line, such as pip install 'chatjobs[worker]'."""
    clone = Path(__file__).parents[1]
    if (clone / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{clone}[{extra}]')}"
    try:
        text = distribution("chatjobs").read_text("direct_url.json")
        source: dict[str, Any] = json.loads(text or "{}")
    except (PackageNotFoundError, ValueError):
        source = {}
    return f"pip install {shlex.quote(_requirement(source, extra))}"


def _requirement(source: dict[str, Any], extra: str) -> str:
    """The argument of pip install, from what pip has recorded about the source."""
    url = str(source.get("url", ""))
    parts = urlsplit(url)
    if parts.scheme == "file":
        path = Path(unquote(parts.path))
        return f"{path}[{extra}]" if path.exists() else f"chatjobs[{extra}]"
    vcs = source.get("vcs_info")
    if url and isinstance(vcs, dict):
        return f"chatjobs[{extra}] @ {vcs.get('vcs')}+{url}@{vcs.get('commit_id')}"
    return f"chatjobs[{extra}] @ {url}" if url else f"chatjobs[{extra}]"
