"""The live page has the gateways of the gateway's tests."""

from tests.jobs.gateway.conftest import site, start

__all__ = ["site", "start"]
