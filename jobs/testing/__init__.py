"""For the unit tests of applications: `FakeWorker` answers jobs without a server or a model."""

from __future__ import annotations

from importlib.util import find_spec

if not (find_spec("fakeredis") and find_spec("lupa")):
    from jobs.install import command_for

    raise ImportError(f"jobs.testing needs fakeredis and lupa: {command_for('testing')}")

from jobs.testing.fake_worker import Answers, FakeWorker
from jobs.testing.replies import Answer, Reply

__all__ = ["Answer", "Answers", "FakeWorker", "Reply"]
