"""Compiling and finding the kernels: cache, several processes, and machines without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from worker.kernels import build
from worker.kernels.build import AMX, AVX2, AVX512, CannotBuild

REPORT = "from worker.kernels import library; print(library.description())"


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def need_compiler() -> str:
    try:
        return build.find_compiler()
    except CannotBuild as error:
        pytest.skip(str(error))


def cpuinfo(path: Path, *flags: str) -> Path:
    path.write_text(f"processor : 0\nflags\t\t: {' '.join(flags)}\n\nprocessor : 1\n")
    return path


def test_a_level_needs_all_its_features(tmp_path: Path) -> None:
    tiles = cpuinfo(tmp_path / "tiles", *AMX.features, "sse2")
    assert build.usable_levels(tiles) == [AMX, AVX512, AVX2]
    full = cpuinfo(tmp_path / "full", *AVX512.features, "sse2")
    assert build.usable_levels(full) == [AVX512, AVX2]
    no_bf16 = cpuinfo(tmp_path / "no_bf16", *(AVX512.features - {"avx512_bf16"}))
    assert build.usable_levels(no_bf16) == [AVX2]
    assert build.usable_levels(cpuinfo(tmp_path / "old", "sse2", "avx")) == []
    assert build.usable_levels(tmp_path / "missing") == []


def test_the_vendor_is_read(tmp_path: Path) -> None:
    path = tmp_path / "amd"
    path.write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\nflags : sse2\n\nprocessor\t: 1\n")
    assert build.vendor(path) == "AuthenticAMD"
    assert build.vendor(tmp_path / "missing") == ""


def test_the_path_depends_on_flags_and_compiler(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Path] = []
    monkeypatch.setattr(build, "compile_to", lambda target, *_: compiled.append(target))
    monkeypatch.setattr(build, "find_compiler", lambda: "one")
    monkeypatch.setattr(build, "_version", lambda compiler: compiler)
    build.library_path(AVX2)
    build.library_path(AVX512)
    monkeypatch.setenv("CXXFLAGS", "-g")
    build.library_path(AVX2)
    monkeypatch.delenv("CXXFLAGS")
    monkeypatch.setattr(build, "find_compiler", lambda: "two")
    build.library_path(AVX2)
    monkeypatch.setattr(build, "_source_key", lambda: "changed")
    build.library_path(AVX2)
    assert len(set(compiled)) == 5
    assert all(path.is_relative_to(empty_cache / "chatjobs" / "kernels") for path in compiled)


def test_of_several_processes_one_compiles_and_all_load(empty_cache: Path) -> None:
    need_compiler()
    if not build.usable_levels():
        pytest.skip("this CPU has no kernels")
    command = [sys.executable, "-c", REPORT]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [worker.communicate(timeout=170)[0] for worker in workers]
    assert all(output.startswith("native, ") for output in outputs)
    files = sorted(path.name for path in build.cache_folder().rglob("*") if path.is_file())
    assert files == [f"kernels-{build.usable_levels()[0].name}.so", "lock"]


def test_without_a_compiler_torch_computes_and_one_line_says_so(empty_cache: Path) -> None:
    script = (
        "import logging; logging.basicConfig(level='WARNING')\n"
        "import torch\n"
        "from worker.kernels import library\n"
        "assert not library.serves(torch.ones(2))\n"
        "assert not library.serves(torch.ones(2))\n"
        "print(library.description())\n"
    )
    environment = {**os.environ, "PATH": str(empty_cache / "nothing")}
    environment.pop("CXX", None)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    if not build.usable_levels():
        pytest.skip("this CPU has no kernels")
    assert done.stdout.startswith("torch alone")
    (line,) = [line for line in done.stderr.splitlines() if "worker.kernels" in line]
    assert "there is no C++ compiler (g++, c++, clang++) on the PATH" in line
    assert "twice as long" in line


def test_a_compiler_that_fails_is_reported_with_its_message(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_compiler()
    monkeypatch.setenv("CXXFLAGS", "-march=unknown-cpu")
    with pytest.raises(CannotBuild, match=r"failed \(.*unknown-cpu"):
        build.library_path(AVX2)
    assert not list(build.cache_folder().rglob("*.so"))


def test_a_cache_that_can_not_be_written_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_compiler()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CannotBuild, match="can't be compiled in"):
        build.library_path(AVX2)


def test_the_package_is_built_for_every_level_and_preferred(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_compiler()
    monkeypatch.setattr(build, "PREBUILT", empty_cache / "prebuilt")
    paths = build.build_package()
    assert [build.library_path(level) for level in build.LEVELS] == paths
    monkeypatch.setattr(build, "_source_key", lambda: "0" * 64)  # other sources: compiled anew
    monkeypatch.setattr(build, "compile_to", lambda *_: None)
    assert build.library_path(AVX2) not in paths


def test_kernels_share_the_threads_of_torch() -> None:
    need_compiler()
    script = (
        "import torch, pathlib\n"
        "from worker.kernels import library\n"
        "assert library.active() is not None\n"
        "maps = pathlib.Path('/proc/self/maps').read_text().splitlines()\n"
        "print(len({line.split()[-1] for line in maps if 'libgomp' in line}))\n"
    )
    if not build.usable_levels():
        pytest.skip("this CPU has no kernels")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120)
    assert done.stdout.strip() == b"1"
