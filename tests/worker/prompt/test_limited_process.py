"""A helper process that does not answer, or can't start, costs seconds and no job."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from jobs import JobError
from tests.worker.prompt.test_encoder import LONG
from tests.worker.site import PATIENCE, wait_until
from tests.worker.sources import read_tokenizer
from tests.worker.tokenizers import save_tokenizer
from worker.backend import MachineError
from worker.prompt import limited_process, sandbox
from worker.prompt.encoder import PromptEncoder
from worker.prompt.limited_process import LimitedProcess
from worker.prompt.sandbox import Sandbox
from worker.prompt.template import ChatTemplate

HELLO = {"messages": "Hello!"}
SHOUT = "{{ messages }}!"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited_process, "CHILD_STALL_SECONDS", 2.0)


def stop(child: LimitedProcess) -> int:
    """Stop a helper as `kill -STOP` does. Returns its process id."""
    pid = child.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    return pid


def cpu_ticks(pid: int) -> int:
    """CPU time of a process, in hundredths of a second."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return int(user) + int(system)


@pytest.mark.parametrize("size", [1, 10_000_000], ids=["a short request", "a full pipe"])
def test_a_stopped_renderer_is_replaced_and_the_prompt_is_rendered(size: int) -> None:
    tried = Sandbox()
    tried.check(SHOUT)
    stopped = stop(tried._child)
    text = "x" * size
    assert tried.render(SHOUT, {"messages": text}) == text + "!"
    assert tried._child.pid != stopped
    assert not Path(f"/proc/{stopped}").exists()


def test_a_stopped_tokenizer_is_replaced_and_the_prompt_is_tokenized(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, "llama3")
    tokenizer = read_tokenizer(tmp_path)
    tokenize = PromptEncoder(tokenizer, 1_000_000)
    expected = tokenize.encode(LONG)
    stopped = stop(tokenize._child)
    assert tokenize.encode(LONG) == expected
    assert tokenize._child.pid != stopped


def test_a_helper_that_is_stopped_while_it_works_is_replaced() -> None:
    tried = Sandbox()
    tried.check(SHOUT)
    with ThreadPoolExecutor(1) as pool:
        slow = "{% for a in range(9999) %}{% for b in range(200) %}{% endfor %}{% endfor %}"
        running = pool.submit(tried.render, slow + SHOUT, HELLO)
        stop(tried._child)
        assert running.result(PATIENCE) == "Hello!!"


def test_helpers_that_never_answer_are_the_machine_s_fault() -> None:
    """The job is returned and runs on another worker, instead of failing for good."""
    tried = Sandbox()
    tried._child._command = [sys.executable, "-c", "import time; time.sleep(3600)"]
    with pytest.raises(MachineError, match="chat templates does not answer: it did not work"):
        tried.render(SHOUT, HELLO)
    assert tried._child.pid is None


def test_a_helper_that_takes_too_long_on_a_busy_machine_is_not_the_template_s_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limited_process, "MAX_WAIT", 0.5)
    tried = Sandbox()
    tried._child._command = [sys.executable, "-c", "while True: pass"]
    with pytest.raises(MachineError, match=r"chat templates did not answer within 0\.5 s"):
        tried.render(SHOUT, HELLO)


def test_a_helper_that_waits_for_a_slow_start_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It uses CPU time, however little it gets of it."""
    monkeypatch.setattr(sandbox, "RENDER_SECONDS", 60.0)
    tried = Sandbox()
    tried.check(SHOUT)
    first = tried._child.pid
    slow = "{% for a in range(9999) %}{% for b in range(500) %}{% endfor %}{% endfor %}"
    assert tried.render(slow + SHOUT, HELLO) == "Hello!!"
    assert tried._child.pid == first


@pytest.mark.parametrize(
    "ask",
    [
        lambda template: template.takes_tools,
        lambda template: template.calls_need_content,
        lambda template: template._probe(),
    ],
)
def test_a_failed_helper_says_nothing_about_the_template(
    ask: Callable[[ChatTemplate], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template whose probe fails counts as one that does not take parts, or takes tools."""
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    broken = LimitedProcess("the process that renders chat templates", "worker.no_such", 1 << 30)
    monkeypatch.setattr(template._sandbox, "_child", broken)
    with pytest.raises(MachineError, match=r"can't be started: .*No module named worker\.no_such"):
        ask(template)


def test_a_helper_that_can_not_start_is_described_in_one_sentence() -> None:
    tried = Sandbox()
    tried._child._command = [sys.executable, "-c", "print(open('/nope'))"]
    with pytest.raises(MachineError) as caught:
        tried.render(SHOUT, HELLO)
    assert caught.value.message == (
        "the process that renders chat templates can't be started: "
        "FileNotFoundError: [Errno 2] No such file or directory: '/nope'"
    )
    tried._child._command = ["/nope"]
    with pytest.raises(MachineError, match=r"can't be started: .*No such file.*'/nope'"):
        tried.render(SHOUT, HELLO)


def test_a_lower_limit_of_the_address_space_is_kept_and_helpers_work() -> None:
    """`ulimit -v` below the limit that the helper sets itself."""
    code = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_AS, (600 << 20, 600 << 20))\n"
        "from worker.prompt.sandbox import Sandbox\n"
        "print(Sandbox().render('{{ a }}', {'a': 'fine'}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("fine\n", "")


def test_too_little_address_space_for_a_helper_is_named() -> None:
    code = (
        "import resource, sys\n"
        "from worker.prompt.sandbox import Sandbox\n"
        "resource.setrlimit(resource.RLIMIT_AS, (600 << 20, 600 << 20))\n"
        "tried = Sandbox()\n"
        "tried._child._command = [sys.executable, '-c', 'bytearray(1 << 30)']\n"
        "try: tried.check('a')\n"
        "except Exception as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == (
        "internal: the process that renders chat templates can't be started: MemoryError; "
        "`ulimit -v` gives each process 600 MiB: raise it\n"
    )
    assert done.stderr == ""


def test_a_limit_of_open_files_is_named() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    tried = Sandbox()
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
    taken: list[int] = []
    try:
        with suppress(OSError):
            while True:  # also the numbers below that other tests have given back
                taken.append(os.dup(0))
        with pytest.raises(MachineError, match=r"can't be started: .*Too many open files"):
            tried.check("a")
    finally:
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    tried.check("a")


def test_a_killed_helper_is_an_error_that_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "RENDER_SECONDS", 60.0)
    tried = Sandbox()
    tried.check("a")
    pid = tried._child.pid
    assert pid is not None
    before = cpu_ticks(pid)
    with ThreadPoolExecutor(1) as pool:
        slow = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
        running = pool.submit(tried.render, slow, HELLO)
        wait_until(lambda: cpu_ticks(pid) >= before + 10)  # it works on the request
        tried._child.close()
        with pytest.raises(JobError, match="ended \\(-9\\): try again") as caught:
            running.result(PATIENCE)
        assert caught.value.retryable
