"""The address of an upstream, and its secrets: no text that others read has them."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import unquote, urlsplit

from jobs.errors import invalid

KEY_VARIABLE = "CHATJOBS_UPSTREAM_API_KEY"
FORM = (
    "the form is http://host[:port][/path] or https://…, the base URL that OpenAI's clients take, "
    "such as http://localhost:8000/v1"
)
KEY = re.compile(r"[\x21-\x7e]+")  # characters that a header may have
MASK = "***"


@dataclass(frozen=True, slots=True)
class Address:
    """`url`: the base URL without a login, without a slash at its end. `headers`: those that prove
    who asks. `secrets`: texts that may not be shown."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def parse(cls, url: str, environ: Mapping[str, str]) -> Self:
        """`url`: as an operator gives it; a login in it is sent by HTTP's basic authentication.
        Raises InvalidRequest, which shows nothing of a login."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise invalid(f"the URL of the upstream is invalid: {FORM}", "upstream") from None
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
            raise invalid(f"the URL of the upstream is invalid: {FORM}", "upstream")
        place = f"[{host}]" if ":" in host else host
        place += f":{port}" if port is not None else ""
        shown = f"{parts.scheme}://{place}{parts.path.rstrip('/') or '/v1'}"
        key = environ.get(KEY_VARIABLE, "")
        if parts.username is not None:
            if key:
                raise invalid(
                    f"the URL of the upstream has a login and {KEY_VARIABLE} a key: both go into "
                    "the header Authorization, so give one",
                    "upstream",
                )
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            code = base64.b64encode(login.encode()).decode()
            secrets = (parts.password or "", unquote(parts.password or ""), code)
            return cls(shown, {"Authorization": f"Basic {code}"}, tuple(filter(None, secrets)))
        if not key:
            return cls(shown)
        if not KEY.fullmatch(key):
            raise invalid(
                f"{KEY_VARIABLE} has a space, a line break or another character that an HTTP "
                "header can't have: remove it",
                "upstream",
            )
        return cls(shown, {"Authorization": f"Bearer {key}"}, (key,))

    def __str__(self) -> str:
        return self.url

    def masked(self, text: str) -> str:
        """A text of the upstream, or about it, without the secrets."""
        for secret in self.secrets:
            text = text.replace(secret, MASK)
        return text
