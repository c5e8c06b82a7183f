"""Pipelines of scripts: one round trip, also on a server that does not have the scripts."""

from __future__ import annotations

import pytest

from jobs.client.connection import connect

SCRIPT = "return ARGV[1]"
OTHER = "return {ARGV[1]}"


@pytest.mark.parametrize("raise_on_error", [True, False])
def test_a_pipeline_loads_only_the_scripts_that_the_server_does_not_have(
    redis_url: str, raise_on_error: bool
) -> None:
    with connect(redis_url) as redis:
        script, other = redis.register_script(SCRIPT), redis.register_script(OTHER)
        redis.script_flush()
        redis.script_load(OTHER)
        redis.config_resetstat()
        pipeline = redis.pipeline(transaction=False)
        for number in range(3):
            script(args=[number], client=pipeline)
            other(args=[number], client=pipeline)
            pipeline.incr("runs")
        replies = pipeline.execute(raise_on_error=raise_on_error)
        assert replies == [b"0", [b"0"], 1, b"1", [b"1"], 2, b"2", [b"2"], 3]
        assert redis.info("commandstats").get("cmdstat_script|exists") is None


def test_a_pipeline_whose_scripts_the_server_has_sends_nothing_else(redis_url: str) -> None:
    with connect(redis_url) as redis:
        script = redis.register_script(SCRIPT)
        redis.script_load(SCRIPT)
        redis.config_resetstat()
        pipeline = redis.pipeline(transaction=False)
        script(args=[1], client=pipeline)
        assert pipeline.execute() == [b"1"]
        commands = set(redis.info("commandstats"))
        assert commands <= {"cmdstat_evalsha", "cmdstat_config|resetstat", "cmdstat_info"}


def test_a_transaction_loads_its_scripts_first(redis_url: str) -> None:
    with connect(redis_url) as redis:
        script = redis.register_script(SCRIPT)
        redis.script_flush()
        pipeline = redis.pipeline(transaction=True)
        pipeline.incr("runs")
        script(args=[1], client=pipeline)
        assert pipeline.execute() == [1, b"1"]
