"""Chat templates are untrusted code: none may harm the worker."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from typing import Any

import pytest

from jobs import JobError
from tests.waiting import PATIENCE, has_ended, wait_until
from worker.prompt import limited_process, sandbox
from worker.prompt.template import ChatTemplate

HELLO = {"role": "user", "content": "Hello!"}
NESTED_LISTS = (
    "{% set ns = namespace(s=['a']) %}"
    "{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}"
)
NESTED = "{% for a in [1] %}" * 30 + "{% endfor %}" * 30


def template(source: str, **others: str) -> ChatTemplate:
    return ChatTemplate({"default": source, **others}, {"eos_token": "</s>"})


def refusal(source: str, messages: list[dict[str, Any]] | None = None) -> JobError:
    with pytest.raises(JobError) as caught:
        template(source).render(messages or [HELLO])
    return caught.value


def test_a_long_reason_of_a_template_is_cut() -> None:
    source = "{{ raise_exception('no:\\n' ~ messages) }}"
    message = refusal(source, [{"role": "user", "content": "y" * 100_000}]).message
    assert message.startswith("the model's chat template refuses: no: [{")
    assert message.endswith("yyy… (100037 characters)")
    assert len(message) < 400


@pytest.mark.parametrize(
    "source",
    ["{% for %}", "{{ x", "{% nonsense %}", NESTED, "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"],
)
def test_an_invalid_template_is_refused_when_it_is_compiled(source: str) -> None:
    with pytest.raises(JobError) as caught:
        template(source)
    assert caught.value.code == "unsupported_model"
    assert caught.value.message.startswith("the model's chat template is not valid Jinja")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ (messages | attr('__class__')).x }}",
        "{{ messages['__class__'].mro() }}",
        "{{ raise_exception.__globals__['jinja2'] }}",
        "{{ strftime_now.__globals__['datetime'] }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ namespace.__init__.__globals__.x }}",
        "{{ dict.__base__.__subclasses__() }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__init__=1) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages.clear() }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox_or_change_the_messages(source: str) -> None:
    messages = [dict(HELLO)]
    error = refusal(source, messages)
    assert error.code == "unsupported_model"
    assert error.message.startswith("the model's chat template is blocked by the sandbox")
    assert messages == [HELLO]


@pytest.mark.parametrize(
    "source",
    [
        "{{ strftime_now.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ environment }}",
    ],
)
def test_internals_render_as_empty_text(source: str) -> None:
    assert template(source).render([HELLO]) == ""


@pytest.mark.parametrize(
    "source",
    [
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{{ b }}{% endfor %}{% endfor %}",
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro g(n) %}{{ caller(n) }}{{ caller(n) }}{% endmacro %}"
        "{% macro f(n) %}{% if n %}{% call(m) g(n) %}{{ f(m-1) }}{% endcall %}{% endif %}"
        "{% endmacro %}{{ f(60) }}",
    ],
    ids=["loops that write", "silent loops", "macros", "blocks"],
)
def test_an_endless_template_is_stopped_and_the_next_one_works(
    monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr(sandbox, "RENDER_SECONDS", 0.2)
    monkeypatch.setattr(limited_process, "MAX_WAIT", PATIENCE)
    error = refusal(source)
    assert error.code == "unsupported_model"
    assert error.message.startswith("the model's chat template exceeds the limits of the sandbox")
    assert template("{{ messages[0].content }}").render([HELLO]) == "Hello!"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{{ 'the answer' * 90 }}{% endfor %}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ 10 ** 12 * [0] }}",
        "{{ (10 ** 10) ** (10 ** 10) }}",
        "{% set ns = namespace(s='a') %}{% for i in range(64) %}"
        "{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='a') %}{% for i in range(64) %}"
        "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='a') %}{% for i in range(64) %}"
        "{% set s %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = s %}{% endfor %}",
        "{% set ns = namespace(s=[0]) %}{% for i in range(64) %}"
        "{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% for i in range(99999) if range(99999) | list | length < 0 %}{% endfor %}",
        NESTED_LISTS + "{{ ns.s }}",
        NESTED_LISTS + "{{ ns.s | tojson }}",
        NESTED_LISTS + "{{ ns.s | string | length }}",
        "{% set a = [1] * 10000000 %}{{ ([a] * 1000) | sum(start=[]) | length }}",
        "{% set r = range(99999) | list %}{{ (r * 500) | map('string') | sort | length }}",
        "{{ 'x' | center(4000000000) }}",
        "{{ messages[0].content | center(4000000000) }}",
        "{{ '%0*d' | format(4000000000, 1) }}",
    ],
)
def test_unbounded_memory_is_stopped_and_the_next_template_works(
    monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr(sandbox, "RENDER_SECONDS", 0.5)
    monkeypatch.setattr(limited_process, "MAX_WAIT", PATIENCE)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    error = refusal(source)
    assert error.code == "unsupported_model"
    assert error.message.startswith("the model's chat template exceeds the limits of the sandbox")
    assert template("{{ messages[0].content }}").render([HELLO]) == "Hello!"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 100_000  # KiB


def test_a_killed_renderer_is_restarted() -> None:
    ready = template("{{ messages[0].content }}")
    pid = sandbox.shared_sandbox()._child.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ready.render([HELLO]) == "Hello!"


def test_a_renderer_exits_with_its_worker() -> None:
    code = (
        "import os, signal; from worker.prompt.sandbox import Sandbox\n"
        "sandbox = Sandbox(); sandbox.check('a')\n"
        "print(sandbox._child.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE
    )
    wait_until(lambda: has_ended(int(done.stdout)))


def test_a_range_is_bounded() -> None:
    assert "Range too big" in refusal("{% for i in range(10**9) %}{% endfor %}").message


def test_recursion_is_bounded() -> None:
    error = refusal("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")
    assert error.code == "unsupported_model"
    assert "exceeds the limits of the sandbox: it recurses" in error.message


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[7].content.strip() }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 3 }}",
        "{{ messages | xmlattr }}",
        "{% include 'other' %}",
        "{{ nothing() }}",
        "{{ strftime_now(3) }}",
    ],
)
def test_a_template_that_fails_fails_the_request_in_one_sentence(source: str) -> None:
    error = refusal(source)
    assert (error.code, error.param) == ("invalid_request", "messages")
    assert error.message.startswith("the model's chat template fails on these messages: ")
    assert "\n" not in error.message


def test_common_features_of_templates_work() -> None:
    source = (
        "{% generation %}{{ messages[0].content | trim }}{% endgeneration %}"
        "{% for i in [1, 2, 3, 4] %}{% if i == 2 %}{% continue %}{% endif %}"
        "{% if i == 4 %}{% break %}{% endif %}{{ loop.index ~ '/' ~ loop.length }} {% endfor %}"
        "{% macro twice(x) %}{{ x * 2 }}{{ caller() }}{% endmacro %}"
        "{% call twice('ab') %}!{% endcall %} {{ 2 ** 3 + 1.5 * 2 }} {{ [1] + [2] }}"
        " {{ {'ü': '<'} | tojson }} {{ dict(a=1).a }} {{ eos_token }}{{ missing }}"
    )
    text = template(source).render([{"role": "user", "content": " hi "}])
    assert text == 'hi1/4 3/4 abab! 11.0 [1, 2] {"ü": "<"} 1 </s>'
