"""The wheel, installed into an empty environment without the repository, and an editable install.

The environments hold exactly what the requirements of the distribution name: their packages are
links to those of this environment, so that nothing is downloaded.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pip
import pytest
from packaging.requirements import Requirement

from jobs import Client
from jobs.store.worker_status import read_workers
from tests.test_readme import README, blocks
from tests.waiting import PATIENCE
from tests.worker.upstream.fake_server import serving
from worker.kernels import build
from worker.kernels.formats import FORMATS

pytestmark = pytest.mark.timeout(0)  # packages are built, on a machine that may be busy

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
SEPARATOR = "--- next block ---"
READERS = ("datasets", "duckdb", "pandas", "polars")
# A block that uses a reader is code of that library as well, and some have no types.
WITH_READER = re.compile(rf"\b(?:{'|'.join(READERS)}|rows)\b")


def requirements(*extras: str) -> list[str]:
    """The packages that the distribution with these extras requires."""
    optional = PROJECT["optional-dependencies"]
    return [*PROJECT["dependencies"], *(one for extra in extras for one in optional[extra])]


def closure(names: Iterable[str]) -> list[Distribution]:
    """The distributions of these requirements, with all that they require."""
    found: dict[str, Distribution] = {}
    todo = [Requirement(name) for name in names]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        one = todo.pop()
        if (key := (one.name.lower(), frozenset(one.extras))) in seen:
            continue
        seen.add(key)
        found[one.name.lower()] = package = distribution(one.name)
        for text in package.requires or ():
            further = Requirement(text)
            extras = [{"extra": extra} for extra in ("", *one.extras)]
            if further.marker is None or any(further.marker.evaluate(extra) for extra in extras):
                todo.append(further)
    return list(found.values())


class Environment:
    """A virtual environment with links to some packages of this one."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.bin = folder / "bin"
        self.python = self.bin / "python"
        self.pip = [str(self.python), str(Path(pip.__file__).parent)]  # as `pip --python` runs it
        (site,) = folder.glob("lib/python*/site-packages")
        for package in closure(names):
            for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
                if not (site / top).exists():
                    (site / top).symlink_to(Path(str(package.locate_file(top))).resolve())

    def install(self, *arguments: str | Path) -> None:
        """Install into it without an index and without dependencies."""
        options = ["--quiet", "--no-deps", "--no-index", "--no-compile"]
        subprocess.run([*self.pip, "install", *options, *arguments], check=True)

    def check_types(self, folder: Path, mypy: str) -> dict[str, dict[str, set[int]]]:
        """The lines with errors of each script in the folder, as mypy and pyright report them, each
        strict and without a plugin. `mypy`: sections for its configuration."""
        scripts = [str(script) for script in folder.glob("*.py")]
        config, pyright_config = folder / "mypy.ini", folder / "pyrightconfig.json"
        config.write_text(f"[mypy]\nstrict = true\n{mypy}")
        pyright_config.write_text(
            '{"typeCheckingMode": "strict", "reportUnnecessaryTypeIgnoreComment": true}'
        )
        options = [f"--config-file={config}", "--cache-dir=/dev/null"]
        commands = {
            "mypy": [*options, "--python-executable", str(self.python)],
            "pyright": ["--project", str(pyright_config), "--pythonpath", str(self.python)],
        }
        found: dict[str, dict[str, set[int]]] = {}
        for name, words in commands.items():
            command = [f"{BIN}/{name}", *words, *scripts]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            print(done.stdout, done.stderr)  # pytest shows it if the test fails
            found[name] = {Path(script).name: set() for script in scripts}
            for script, number in re.findall(r"(\w+\.py):(\d+):.*error", done.stdout):
                found[name][script].add(int(number))
            assert done.returncode == any(found[name].values()), name
        return found

    def run(self, command: Sequence[str | Path], folder: Path, **variables: str) -> str:
        """stdout of the command; fails with its output unless it exits with 0."""
        inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(
            command, cwd=folder, env={**inherited, **variables}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the distribution, apart from the repository."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("jobs", "worker"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-isolation", "--skip-dependency-check", "--outdir", str(folder)]
    command = [sys.executable, "-m", "build", *options, str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel with three extras, the readers of the README, and the openai package."""
    environment = Environment(
        tmp_path_factory.mktemp("installed"),
        [*requirements("worker", "embedded", "testing"), *READERS, "openai"],
    )
    environment.install(wheel)
    return environment


@pytest.fixture(scope="module")
def editable(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An editable install of a clone, without extras."""
    clone = tmp_path_factory.mktemp("clones") / "a clone"
    shutil.copytree(source, clone)
    environment = Environment(tmp_path_factory.mktemp("editable"), [*requirements(), "setuptools"])
    environment.install("--no-build-isolation", "--editable", clone)
    return environment


@pytest.fixture
def served(installed: Environment, redis_url: str, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The variables of a Redis with a worker for the demo model, in the folder `tmp_path`."""
    variables = {"CHATJOBS_REDIS_URL": redis_url, "HF_HOME": str(tmp_path / "hf")}
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    worker = subprocess.Popen(
        [installed.bin / "chatjobs", "work", "--model", "demo"],
        cwd=tmp_path,
        env={**inherited, **variables},
    )
    with Client(redis_url) as client:
        while not read_workers(client.redis):
            assert worker.poll() is None, "the worker did not start"
            time.sleep(0.1)
    yield variables
    worker.terminate()
    assert worker.wait(timeout=PATIENCE) == 0


@pytest.mark.installed
def test_the_readme_as_one_script_passes_with_the_wheel(
    installed: Environment, served: dict[str, str], tmp_path: Path
) -> None:
    """As it is pasted, without a pause. A line between two blocks separates their output."""
    headings, codes = zip(*blocks(), strict=True)
    script = tmp_path / "readme.py"
    script.write_text(f"\nprint({SEPARATOR!r})\n".join(codes))
    output = installed.run([installed.python, script], tmp_path, **served)
    printed: dict[str, list[str]] = {}
    for heading, text in zip(headings, output.split(f"{SEPARATOR}\n"), strict=True):
        printed.setdefault(heading, []).append(text)
    assert printed["Enqueue"] == ["42\n"]
    assert printed["Follow"] == ["42"]
    assert "42" in printed["Read Parquet"][1]
    assert printed["Code for the openai package"] == ["5"]
    assert printed["Many jobs"][0].startswith("['1', '2', '3']\n")
    assert printed["Many jobs"][0].count(" finished\n") == 3
    assert printed["Errors"][0].startswith("invalid_request top_p: ")
    assert printed["asyncio"] == ["42\n"]
    assert "rows=100, failed=0" in printed["Runs"][1]
    assert "ok" in printed["Runs"][2]  # DuckDB
    assert printed["Runs"][-1] == "100\n"


@pytest.mark.installed
def test_the_wheel_alone_holds_no_repository(installed: Environment, tmp_path: Path) -> None:
    code = "import jobs, worker; print(jobs.__file__, worker.__file__)"
    for path in installed.run([installed.python, "-c", code], tmp_path).split():
        assert Path(path).is_relative_to(installed.bin.parent)


def test_a_worker_of_an_upstream_needs_one_extra_without_torch(
    wheel: Path, redis_url: str, tmp_path: Path
) -> None:
    environment = Environment(tmp_path / "env", requirements("upstream"))
    environment.install(wheel)
    with contextmanager(serving)() as server, Client(redis_url) as client:
        job = client.submit({"model": "there", "messages": [{"role": "user", "content": "hi"}]})
        words = ["--upstream", server.url, "--model", "there", "--burst", "--results", "rows"]
        environment.run(
            [environment.bin / "chatjobs", "work", *words], tmp_path, CHATJOBS_REDIS_URL=redis_url
        )
        assert job.result(timeout=1).text == "You said: hi "
    code = "import importlib.util as util; assert util.find_spec('torch') is None"
    environment.run([environment.python, "-c", code], tmp_path)


# Each is one mistake, in the last line of a function that has `client` or `aclient`.
MISTAKES = {
    "submit": 'client.submit({"model": "demo", "mesages": []})',
    "missing": 'client.submit({"model": "demo"})',
    "type": 'client.submit({"model": "demo", "messages": [], "temperature": "0"})',
    "job": 'client.submit({"model": "demo", "messages": [], "job": {"rum": "r"}})',
    "turn": 'client.submit({"model": "demo", "messages": [], "job": {"turn": {"wayt": True}}})',
    "list": 'client.submit_many([{"model": "demo", "mesages": []}])',
    "generator": 'client.submit_many({"model": "demo", "mesages": []} for _ in range(2))',
    "request": 'ChatRequest(model="demo", messages=[], temprature=0)',
    "session": 'client.session(model="demo", temprature=0)',
    "of a turn": 'client.session(model="demo", request_id="a")',
    "turn of a session": 'client.session(model="demo").submit("hi", temprature=0)',
    "send": 'client.session(model="demo").send("hi", temprature=0)',
    "stream": 'client.session(model="demo").stream("hi", temprature=0)',
    "edit": 'client.session(model="demo").edit("hi", temprature=0)',
    "restart": 'client.job("a").stream(on_restart="ignore")',
    "create": 'client.chat.completions.create(model="demo", messages=[], temprature=0)',
    "timeout": 'client.chat.completions.create(model="demo", messages=[], timeout="1")',
    "async": 'await aclient.submit({"model": "demo", "mesages": []})',
    "async list": 'await aclient.submit_many([{"model": "demo", "mesages": []}])',
    "async session": 'await aclient.session(model="demo", temprature=0)',
    "async send": 'await (await aclient.session(model="demo")).send("hi", temprature=0)',
    "async create": "await aclient.chat.completions.create(model='demo', mesages=[])",
}


# No script uses a type of theirs, and mypy reads them whole. pyright reads what it needs.
UNUSED_TYPES = """
[mypy-duckdb.*,fakeredis.*,gguf.*,h11.*,httpcore2.*,huggingface_hub.*,idna.*,numpy.*]
follow_imports = skip
follow_imports_for_stubs = True
[mypy-openai.*,polars.*,rich.*,rq.*,tokenizers.*,torch.*]
follow_imports = skip
follow_imports_for_stubs = True
[mypy-openai,openai._client,openai._types]
follow_imports = silent
"""


@pytest.mark.installed
def test_type_checkers_find_misspelt_fields_and_nothing_in_the_examples(
    installed: Environment, tmp_path: Path
) -> None:
    """With mypy --strict and pyright, each mistake is one line."""
    examples = [code for _, code in blocks() if not WITH_READER.search(code)]
    assert len(examples) >= 9
    (types,) = re.findall(
        r"^```python\n(.*?)^```",
        (ROOT / "docs/requests.md").read_text().partition("\n## Types\n")[2].partition("\n## ")[0],
        re.M | re.S,
    )
    (tmp_path / "examples.py").write_text("\n".join([*examples, EXAMPLES, types]))
    lines = ["from jobs import AsyncClient, ChatRequest, Client", ""]
    wanted = []
    for number, mistake in enumerate(MISTAKES.values()):
        lines.append(f"async def f{number}(client: Client, aclient: AsyncClient) -> None:")
        lines += [f"    {mistake}", ""]
        wanted.append(len(lines) - 1)
    (tmp_path / "mistakes.py").write_text("\n".join(lines))
    for checker, found in installed.check_types(tmp_path, UNUSED_TYPES).items():
        assert not found["examples.py"], checker
        missed = [
            name
            for name, line in zip(MISTAKES, wanted, strict=True)
            if line not in found["mistakes.py"]
        ]
        assert not missed, (checker, missed)
        assert found["mistakes.py"] == set(wanted), checker


# In the place of a compiler: its output names the flags, so that the level is seen.
COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo 1.0 && exit
flags="$*"
while [ "$1" != -o ]; do shift; done
echo "$flags" > "$2"
"""


def test_make_wheel_builds_one_for_linux_with_the_kernels_of_every_level(
    source: Path, tmp_path: Path
) -> None:
    """That the kernels of every level compile is tested with the compiler."""
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    recipe = (ROOT / "Makefile").read_text().partition("\nwheel:")[2].split("\n\n")[0]
    commands = [line.strip() for line in recipe.splitlines()[1:]]
    for command in commands:
        command = command.replace("$(BIN)/python", sys.executable)
        command = command.replace("-m build", "-m build --no-isolation --skip-dependency-check")
        environment = {**os.environ, "PYTHONPATH": str(source), "CXX": str(compiler)}
        done = subprocess.run(
            shlex.split(command), cwd=source, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (source / "dist").glob("*.whl")
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    with zipfile.ZipFile(wheel) as archive:
        for level, form in itertools.product(build.LEVELS, ("", *FORMATS)):
            library = f"{level.name}-{form}" if form else level.name
            pattern = rf"worker/kernels/prebuilt/kernels-{library}-[0-9a-f]{{16}}\.so"
            (name,) = [name for name in archive.namelist() if re.fullmatch(pattern, name)]
            assert " ".join(level.flags) in archive.read(name).decode()
    assert not (source / "worker/kernels/prebuilt").exists()


@pytest.mark.installed
def test_an_editable_install_is_found_by_type_checkers(
    editable: Environment, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("from jobs import JobError\n\nprint(JobError.__name__)\n")
    skip = "follow_imports = skip"  # found, with its py.typed
    assert not any(found["script.py"] for found in editable.check_types(tmp_path, skip).values())
    assert editable.run([editable.python, script], tmp_path) == "JobError\n"


def advice(environment: Environment, folder: Path) -> str:
    """The command that a worker without torch names."""
    done = subprocess.run(
        [environment.bin / "chatjobs", "work", "--model", "demo"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )
    assert done.returncode == 3
    (command,) = re.findall(r"needs torch: (pip install .*) \(on Linux a download", done.stderr)
    return str(command)


def follow(advice: str, environment: Environment, folder: Path) -> None:
    """Let pip resolve what is advised, without an index. Each origin has been installed before."""
    _, _, *words = shlex.split(advice)
    options = ["--no-deps", "--no-index", "--no-compile", "--no-build-isolation"]
    options += ["--dry-run", "--force-reinstall"]
    command = [*environment.pip, "install", *options, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Would install chatjobs" in done.stdout
    assert "does not provide the extra" not in done.stderr


@pytest.mark.installed
def test_the_advice_to_install_torch_works_wherever_the_package_came_from(
    source: Path, wheel: Path, editable: Environment, tmp_path: Path
) -> None:
    """A clone, a wheel, a folder; and an index, which pip keeps no record of."""
    command = advice(editable, tmp_path)
    assert " -e " in command
    follow(command, editable, tmp_path)
    environment = Environment(tmp_path / "venv", [*requirements(), "setuptools"])
    folder = tmp_path / "a folder"
    shutil.copytree(source, folder)
    for origin in (wheel, folder):
        environment.install("--no-build-isolation", "--force-reinstall", origin)
        command = advice(environment, tmp_path)
        assert f"{origin}[worker]" in command
        follow(command, environment, tmp_path)
    (record,) = environment.bin.parent.glob("lib/*/site-packages/*.dist-info/direct_url.json")
    record.unlink()
    assert advice(environment, tmp_path) == "pip install 'chatjobs[worker]'"


def test_the_readme_names_what_each_reader_needs() -> None:
    for name in READERS:
        assert f"pip install {name}" in README


# What applications write, beyond the examples of the README.
EXAMPLES = """
from typing import Any

import openai

from jobs import (
    AsyncClient,
    AsyncJob,
    ChatCompletion,
    ChatRequest,
    Client,
    Job,
    JobError,
    RequestFields,
    Results,
)

history = [{"role": "user", "content": "Hi"}]
first = ChatRequest(model="demo", messages=history, temperature=0, stop=["a"], top_k=5)
second = ChatRequest(
    model="demo",
    messages=[{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}],
    logit_bias={5: 1.5},
    job={"run": "sums", "row": 1},
)


def enqueue(client: Client) -> list[ChatCompletion]:
    job: Job = client.submit({"model": "demo", "messages": history, "temperature": 0})
    plain: RequestFields = {"model": "demo", "messages": history, "job": {"run": "sums"}}
    jobs = client.submit_many([first, plain])
    for chunk in job.stream():
        print(chunk.text)
    client.wait_for_rows(jobs, timeout=60)
    outcomes = client.gather(*jobs, return_exceptions=True)
    print([one.message if isinstance(one, JobError) else one.text for one in outcomes])
    return client.gather(*client.as_completed(jobs))


def ask(client: Client) -> str:
    answer = client.chat.completions.create(model="demo", messages=history, seed=1)
    with client.chat.completions.create(model="demo", messages=history, stream=True) as stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    return (answer.choices[0].message.content or "") + text


async def ask_async(client: AsyncClient) -> ChatCompletion:
    job: AsyncJob = await client.submit(first)
    async for ended in client.as_completed([job]):
        print(ended.id)
    stream = await client.chat.completions.create(model="demo", messages=history, stream=True)
    async for chunk in stream:
        print(chunk.text)
    (completion,) = await client.gather(job)
    return completion


def converse(client: Client) -> None:
    session = client.session("id", model="demo", temperature=0, tools=None)
    session.send("Hi", timeout=5, seed=1, job={"id": "a"}, request_id=None)
    for chunk in session.stream("Hi", timeout=5, on_restart="reset", top_k=1):
        print(chunk.text)
    session.edit("Hi", wait=True, timeout=5, max_tokens=9)


def pass_on(client: Client, body: dict[str, Any]) -> Job:
    return client.submit(ChatRequest(**body))


def wait(client: Client) -> None:
    create = client.chat.completions.create
    create(model="demo", messages=history, timeout=openai.Timeout(60, connect=5))
    create(model="demo", messages=history, timeout=openai.Timeout(None), stream=True)
    create(model="demo", messages=history, timeout=None)


print(Results("results").runs())
"""
