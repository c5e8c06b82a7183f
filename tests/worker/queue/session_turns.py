"""Helpers of tests of sessions."""

from __future__ import annotations

from typing import Any

from jobs import ChatRequest, Session
from tests.worker.fake_backend import FakeBackend, text_of
from tests.worker.site import Site

USER = {"role": "user", "content": "hello"}


def answer_to(content: str, words: int = 5) -> str:
    metadata = {"words": str(words)}
    messages: list[Any] = [{"role": "user", "content": content}]
    return text_of(ChatRequest(model="fake", messages=messages, metadata=metadata))


def open_session(site: Site, name: str | None = None, **fields: Any) -> Session:
    site.client.serving = None
    return site.client.session(name, model="fake", **fields)


def run(site: Site, session: Session, *contents: str, **fields: Any) -> FakeBackend:
    """Run turns one after the other, on one backend per turn; returns the last one."""
    backend = FakeBackend()
    for content in contents:
        session.submit(content, **fields)
        site.burst(backend := FakeBackend())
    return backend


def contents(history: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in history]
