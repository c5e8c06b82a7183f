"""Compiling and finding the kernels: cache, several processes, and machines without a compiler.

Tests of the cache, of processes and of failures compile small sources. No test limits the time of a
compiler that works: the machine may be busy.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernel_levels import levels_here
from tests.waiting import has_ended, wait_until
from worker.kernels import build, compilers, library, quantised
from worker.kernels.build import AMX, AVX2, AVX512, AVX512VNNI, AVXVNNI, Level
from worker.kernels.compilers import CannotBuild
from worker.kernels.formats import FORMATS

compiles = pytest.mark.timeout(0)
QUICK = "-O0"  # compiles in a fifth of the time
FUNCTION = 'extern "C" __attribute__((visibility("default"))) int {name}() {{ return 7; }}\n'
# Builds the sources in a folder, loads the library and calls each function.
BUILD = """
import ctypes, pathlib, sys
from worker.kernels import build
build.SOURCES, build.UNITS = pathlib.Path(sys.argv[1]), sys.argv[2:]
library = ctypes.CDLL(str(build.library_path(build.AVX2)))
print(*[getattr(library, pathlib.Path(unit).stem)() for unit in build.UNITS])
"""
SMALL_UNITS = ("one.cpp", "two.cpp", "three.cpp")
REAL = '#!/bin/sh\nexec {compiler} "$@"\n'
# Prints its version, and hangs where it should compile, with a child as compilers have one.
HANGING = """#!/bin/sh
[ "$1" = --version ] && echo 1.0 && exit
echo $$ >> {folder}/pids
sleep 3600 &
echo $! >> {folder}/pids
wait
"""


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def small_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three files in the place of the kernels' sources and one in that of a format's, with a
    function each. The latter is named by the compiler's flags."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in ("one", "two", "three"):
        (folder / f"{name}.cpp").write_text(FUNCTION.format(name=name))
    (folder / build.FORMAT_UNIT).write_text(FUNCTION.format(name="FORMAT"))
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setattr(build, "UNITS", SMALL_UNITS)
    return folder


def need_compiler() -> str:
    try:
        return build.find_compiler()
    except CannotBuild as error:
        pytest.skip(str(error))


def need_kernels() -> None:
    need_compiler()
    if not build.usable_levels():
        pytest.skip("this CPU has no kernels")


def write_compiler(folder: Path, script: str) -> Path:
    """A program in the compiler's place."""
    path = folder / "compiler"
    path.write_text(script)
    path.chmod(0o755)
    return path


def started(folder: Path, count: int) -> list[int]:
    """The processes of compilers that hang, once there are so many."""
    pids = folder / "pids"
    wait_until(lambda: pids.exists() and len(pids.read_text().split()) >= count)
    return [int(word) for word in pids.read_text().split()]


def cpuinfo(path: Path, *flags: str) -> Path:
    path.write_text(f"processor : 0\nflags\t\t: {' '.join(flags)}\n\nprocessor : 1\n")
    return path


def test_a_level_needs_all_its_features(tmp_path: Path) -> None:
    tiles = cpuinfo(tmp_path / "tiles", *AMX.features, "sse2")
    assert build.usable_levels(tiles) == [AMX, AVX512, AVX512VNNI, AVX2]
    full = cpuinfo(tmp_path / "full", *AVX512.features, "sse2")
    assert build.usable_levels(full) == [AVX512, AVX512VNNI, AVX2]
    no_bf16 = cpuinfo(tmp_path / "no_bf16", *(AVX512.features - {"avx512_bf16"}))
    assert build.usable_levels(no_bf16) == [AVX512VNNI, AVX2]
    narrow = cpuinfo(tmp_path / "narrow", *AVXVNNI.features)
    assert build.usable_levels(narrow) == [AVXVNNI, AVX2]
    assert build.usable_levels(cpuinfo(tmp_path / "old", "sse2", "avx")) == []
    assert build.usable_levels(tmp_path / "missing") == []


def test_the_name_of_the_cpu_is_read(tmp_path: Path) -> None:
    path = tmp_path / "amd"
    path.write_text("processor\t: 0\nmodel name\t: AMD EPYC\nflags : sse2\n\nprocessor\t: 1\n")
    assert build.cpu_model(path) == "AMD EPYC"
    assert build.cpu_model(tmp_path / "missing") == ""


def test_the_path_depends_on_flags_and_compiler(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Path] = []
    monkeypatch.setattr(build, "compile_to", lambda targets, *_: compiled.extend(targets.values()))
    monkeypatch.setattr(build, "find_compiler", lambda: "one")
    monkeypatch.setattr(build, "_version", lambda compiler: compiler)
    build.library_path(AVX2)
    build.library_path(AVX512)
    build.library_paths(AVX2, ["Q4_K", "Q6_K"])
    monkeypatch.setenv("CXXFLAGS", "-g")
    build.library_path(AVX2)
    monkeypatch.delenv("CXXFLAGS")
    monkeypatch.setattr(build, "find_compiler", lambda: "two")
    build.library_path(AVX2)
    monkeypatch.setattr(build, "_source_key", lambda: "changed")
    build.library_path(AVX2)
    assert len(set(compiled)) == 7
    assert all(path.is_relative_to(empty_cache / "chatjobs" / "kernels") for path in compiled)


@compiles
def test_of_several_processes_one_compiles_and_all_load(
    empty_cache: Path, small_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = empty_cache / "calls"
    count = f'case "$*" in *" -c "*) echo call >> {calls};; esac\nexec'
    script = REAL.replace("exec", count).format(compiler=need_compiler())
    monkeypatch.setenv("CXX", str(write_compiler(empty_cache, script)))
    command = [sys.executable, "-c", BUILD, str(small_sources), *SMALL_UNITS]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [worker.communicate()[0].split() for worker in workers] == [["7"] * 3] * 3
    assert len(calls.read_text().split()) == 3
    files = sorted(path.name for path in build.cache_folder().rglob("*") if path.is_file())
    assert files == ["kernels-avx2.so", "lock"]


def test_without_a_compiler_torch_computes_and_one_line_says_so(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not build.usable_levels():
        pytest.skip("this CPU has no kernels")
    monkeypatch.setenv("PATH", str(empty_cache / "nothing"))
    monkeypatch.delenv("CXX", raising=False)
    library.active.cache_clear()
    try:
        assert not library.serves(torch.ones(2))
        assert not library.serves(torch.ones(2))
        assert library.description().startswith("torch alone")
    finally:
        library.active.cache_clear()
    (record,) = caplog.records
    assert "there is no C++ compiler (g++, c++, clang++) on the PATH" in record.getMessage()
    assert "with quantised weights many times as long" in record.getMessage()


OLD = """#!/bin/sh
case "$*" in *-mavx512*|*-mavxvnni*) echo "error: unrecognized command-line option" >&2; exit 1;;
esac
exec {compiler} "$@"
"""


@compiles
@pytest.mark.usefixtures("empty_cache")
def test_a_compiler_that_is_older_than_the_cpu_makes_kernels_for_older_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if build.usable_levels()[0] is AVX2:
        pytest.skip("this CPU has no newer instructions")
    fake = write_compiler(tmp_path, OLD.format(compiler=need_compiler()))
    monkeypatch.setenv("CXX", str(fake))
    monkeypatch.setenv("CXXFLAGS", QUICK)
    assert library.load().level is AVX2
    (record,) = [one for one in caplog.records if "are those of avx2 and not" in one.getMessage()]
    assert "unrecognized command-line option" in record.getMessage()


@compiles
@pytest.mark.usefixtures("small_sources")
def test_sources_are_compiled_at_once_and_one_per_core(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each compiler waits for a second one, so one after the other would never end."""
    meet = (
        'case "$*" in *" -c "*) touch {folder}/$$; '
        "while [ $(ls {folder} | wc -l) -lt 2 ]; do sleep 0.02; done;; esac\n"
    )
    folder = empty_cache / "met"
    folder.mkdir()
    script = REAL.replace("exec", meet.replace("{folder}", str(folder)) + "exec")
    fake = write_compiler(empty_cache, script.format(compiler=need_compiler()))
    monkeypatch.setattr(compilers, "_cores", lambda: 2)
    target = empty_cache / "out" / "kernels.so"
    build.compile_to({None: target}, AVX2, str(fake), [QUICK])
    assert len(list(folder.iterdir())) == len(SMALL_UNITS)
    assert [path.name for path in target.parent.iterdir()] == ["kernels.so"]


def test_no_more_compilers_than_cores_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "_cores", lambda: 3)
    count = f"cd {tmp_path}; touch $$; ls | wc -l; sleep 0.05; rm $$"
    outputs = compilers.run([["sh", "-c", count]] * 12)
    assert len(outputs) == 12
    assert max(map(int, outputs)) <= 3


def test_a_compiler_that_hangs_is_reported_and_killed_and_torch_computes(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    need_kernels()
    monkeypatch.setattr(compilers, "COMPILER_STALL_SECONDS", 3.0)
    monkeypatch.setattr(compilers, "NOTICE_SECONDS", 1.0)
    monkeypatch.setattr(build, "_version", str)  # which would have a notice of its own
    fake = write_compiler(empty_cache, HANGING.format(folder=empty_cache))
    monkeypatch.setenv("CXX", str(fake))
    assert library.active.__wrapped__() is None
    notice, warning = (record.getMessage() for record in caplog.records)
    assert notice == f"compiling the CPU kernels with {fake}: this is done once on this machine"
    assert warning.startswith(f"computing with torch alone, because {fake} hangs: it did not work")
    wait_until(lambda: all(map(has_ended, started(empty_cache, 2))))
    assert not list(build.cache_folder().rglob("*.so"))


def test_a_compiler_that_hangs_when_it_is_asked_for_its_version_is_reported(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "COMPILER_STALL_SECONDS", 2.0)
    fake = write_compiler(empty_cache, "#!/bin/sh\nsleep 3600\n")
    monkeypatch.setenv("CXX", str(fake))
    with pytest.raises(CannotBuild, match="hangs: it did not work for 2 s"):
        build.library_path(AVX2)


def test_a_compiler_that_takes_too_long_is_stopped(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "MAX_COMPILE_SECONDS", 0.5)
    fake = write_compiler(empty_cache, "#!/bin/sh\nwhile true; do true; done\n")
    monkeypatch.setenv("CXX", str(fake))
    with pytest.raises(CannotBuild, match=r"compiler took more than 0 s"):
        build.library_path(AVX2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_compilers_end_with_the_process_that_waits_for_them(
    empty_cache: Path, number: signal.Signals
) -> None:
    """Ctrl-C ends a command that starts at once, without any clean-up."""
    fake = write_compiler(empty_cache, HANGING.format(folder=empty_cache))
    command = [sys.executable, "-c", BUILD, str(build.SOURCES), *build.UNITS]
    waiting = subprocess.Popen(
        command, env={**os.environ, "CXX": str(fake)}, stderr=subprocess.DEVNULL
    )
    pids = started(empty_cache, 2)
    waiting.send_signal(number)
    waiting.wait()
    wait_until(lambda: all(map(has_ended, started(empty_cache, 2))))
    assert not has_ended(os.getpid())
    assert pids


@compiles
@pytest.mark.usefixtures("empty_cache", "small_sources")
def test_what_a_killed_process_has_left_is_removed() -> None:
    need_compiler()
    left = build.library_path(AVX2).parent / f"{build.UNFINISHED}x"
    left.mkdir()
    (left / "a.o").write_text("")
    build.library_path(AVX2)
    assert left.exists()  # nothing is compiled
    build.library_path(AVX2).unlink()
    build.library_path(AVX2)
    assert not left.exists()


@compiles
@pytest.mark.usefixtures("empty_cache", "small_sources")
@pytest.mark.parametrize("left", [0.0, 0.5, 1.0], ids=["empty", "cut off", "zeros"])
def test_a_library_that_a_power_cut_has_damaged_is_compiled_again(left: float) -> None:
    need_compiler()
    path = build.library_path(AVX2)
    size = path.stat().st_size
    os.truncate(path, int(left * size) if left < 1 else 0)
    os.truncate(path, int(left * size))
    assert build.library_path(AVX2) == path
    assert ctypes.CDLL(str(path)).one() == 7
    (format_name, *_) = FORMATS
    part = build.library_path(AVX2, format_name)
    os.truncate(part, 10)
    assert build.library_paths(AVX2, [None, format_name]) == [path, part]
    assert getattr(ctypes.CDLL(str(part)), format_name)() == 7


@compiles
@pytest.mark.usefixtures("empty_cache", "small_sources")
def test_a_library_is_on_the_disk_before_it_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    need_compiler()
    steps: list[str] = []
    sync, replace = os.fsync, os.replace

    def noted_sync(number: int) -> None:
        steps.append(f"sync {Path(os.readlink(f'/proc/self/fd/{number}')).name}")
        sync(number)

    def noted_replace(source: Path, target: Path) -> None:
        steps.append(f"rename {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "replace", noted_replace)
    path = build.library_path(AVX2)
    assert steps == [f"sync {path.name}", f"rename {path.name}", f"sync {path.parent.name}"]


def test_a_process_that_waits_for_another_one_says_so(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    need_compiler()
    monkeypatch.setattr(build, "compile_to", lambda *_: None)
    monkeypatch.setattr(build, "_version", str)  # which would take of the time
    target = build.library_path(AVX2)
    monkeypatch.setattr(compilers, "NOTICE_SECONDS", 0.3)
    monkeypatch.setattr(compilers, "MAX_COMPILE_SECONDS", 1.0)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CannotBuild, match=r"another process compiles them for more than \d s"):
            build.library_path(AVX2)
    (record,) = caplog.records
    assert record.getMessage() == "waiting for another process, which compiles the CPU kernels"


def test_without_a_home_folder_the_remedy_is_named(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_compiler()

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME")
    with pytest.raises(CannotBuild, match="there is no home folder for them: set XDG_CACHE_HOME"):
        build.library_path(AVX2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(empty_cache))
    monkeypatch.setattr(build, "compile_to", lambda *_: None)
    assert build.library_path(AVX2).is_relative_to(empty_cache)


def test_a_full_disk_is_named(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = "ld: final link failed: No space left on device\ncollect2: error: ld returned 1"
    script = f"[ \"$1\" = --version ] && echo 1.0 && exit\necho '{full}' >&2\nexit 1\n"
    monkeypatch.setenv("CXX", str(write_compiler(empty_cache, f"#!/bin/sh\n{script}")))
    with pytest.raises(CannotBuild, match=r"failed .*No space left on device"):
        build.library_path(AVX2)


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
    with pytest.raises(CannotBuild, match=r"can't be compiled in .*; XDG_CACHE_HOME names another"):
        build.library_path(AVX2)


@compiles
@pytest.mark.parametrize("level", build.LEVELS, ids=lambda level: level.name)
def test_the_kernels_compile_for_every_level(level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into the user's cache: once for each state of the sources. Those that are tested here are
    compiled before the tests."""
    need_compiler()
    if level not in levels_here():
        monkeypatch.setenv("CXXFLAGS", QUICK)
    assert all(path.exists() for path in build.library_paths(level, [None, *FORMATS]))


@compiles
@pytest.mark.usefixtures("empty_cache", "small_sources")
def test_a_format_is_compiled_when_it_is_needed_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    need_compiler()
    monkeypatch.setattr(compilers, "NOTICE_SECONDS", 0.0)
    monkeypatch.setattr(build, "_version", str)  # which would have a notice of its own
    build.library_path(AVX2)
    assert [path.name for path in build.cache_folder().rglob("*.so")] == ["kernels-avx2.so"]
    base, first, second = build.library_paths(AVX2, [None, "Q4_K", "Q6_K"])
    assert (first.name, second.name) == ("kernels-avx2-Q4_K.so", "kernels-avx2-Q6_K.so")
    assert ctypes.CDLL(str(first)).Q4_K() == ctypes.CDLL(str(base)).one() == 7
    notices = [record.getMessage().partition(" with ")[0] for record in caplog.records]
    assert notices == ["compiling the CPU kernels", "compiling the CPU kernels for Q4_K, Q6_K"]


def test_a_format_whose_kernels_do_not_compile_takes_another_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    need_kernels()
    kernels = library.load()
    monkeypatch.setattr(library, "active", lambda: kernels)

    def full(*_: object) -> Path:
        raise CannotBuild("the disk is full")

    monkeypatch.setattr(build, "library_path", full)
    assert not quantised.serves("Q4_K", 256)
    assert not quantised.serves("Q4_K", 256)
    (record,) = caplog.records
    assert record.getMessage() == "no kernel multiplies with weights in Q4_K: the disk is full"


@compiles
@pytest.mark.usefixtures("small_sources")
def test_the_package_is_built_for_every_level_and_preferred(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_compiler()
    monkeypatch.setattr(build, "PREBUILT", empty_cache / "prebuilt")
    paths = build.build_package()
    for level in build.LEVELS:
        of_level = build.library_paths(level, [None, *FORMATS])
        assert of_level == paths[: len(of_level)]
        del paths[: len(of_level)]
    assert not paths
    monkeypatch.setattr(build, "_source_key", lambda: "0" * 64)  # other sources: compiled anew
    monkeypatch.setattr(build, "compile_to", lambda *_: None)
    assert not build.library_path(AVX2).is_relative_to(build.PREBUILT)


def test_kernels_share_the_threads_of_torch() -> None:
    need_kernels()
    assert library.active() is not None
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert len({line.split()[-1] for line in maps if "libgomp" in line}) == 1
