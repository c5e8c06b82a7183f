"""Compiles the kernels: for this CPU at first use, or for every kind of CPU into the package.

    python -m worker.kernels.build        # before `pip wheel`: prebuilt kernels for x86-64 Linux

A compiled library lies in a folder of the user's cache that is named by the hash of the sources,
the flags, the compiler and the kind of CPU. Of several processes that need it one compiles, with
one compiler per source file and core, and renames the complete file into place.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from worker.kernels import compilers
from worker.kernels.compilers import CannotBuild

logger = logging.getLogger(__name__)

HERE = Path(__file__).parent
SOURCES = HERE / "src"
PREBUILT = HERE / "prebuilt"
COMPILERS = ("g++", "c++", "clang++")
FLAGS = (
    *("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-fvisibility=hidden"),
    *(
        "-fno-exceptions",
        "-fno-rtti",
        "-fno-threadsafe-statics",
        "-fno-math-errno",
        "-ffp-contract=off",
    ),
    *("-Wall", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),  # GCC 12's own headers
)
LINK = "-shared"
SLOWEST = "quantised"  # how the names of the sources begin that are compiled first
UNFINISHED = "build-"  # how the names of folders begin in which a library is built
LIBRARY_POLL_SECONDS = 0.2  # between two looks at whether another process has compiled the library


@dataclass(frozen=True)
class Level:
    """A kind of CPU: the features that it needs, as in /proc/cpuinfo, and the compiler's flags."""

    name: str
    features: frozenset[str]
    flags: tuple[str, ...]


def _level(name: str, *features: str) -> Level:
    flags = tuple(
        f"-m{feature.replace('avx512_', 'avx512').replace('_', '-')}" for feature in features
    )
    return Level(name, frozenset(features), flags)


AVX2 = _level("avx2", "avx2", "fma", "f16c")
AVX512_FEATURES = (
    *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
    *("avx512_vnni", "avx512_bf16"),
)
AVX512 = _level("avx512", *AVX512_FEATURES)
AMX = _level("amx", *AVX512_FEATURES, "amx_tile", "amx_int8", "amx_bf16")
LEVELS = (AMX, AVX512, AVX2)  # best first


def usable_levels(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[Level]:
    """The levels that this CPU has all features of, best first."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    features = set(_cpu_fact("flags", cpuinfo).split())
    return [level for level in LEVELS if level.features <= features]


def vendor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The vendor of the CPU, such as GenuineIntel; empty if unknown."""
    return _cpu_fact("vendor_id", cpuinfo)


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's name, such as AMD EPYC 7003; empty if unknown."""
    return _cpu_fact("model name", cpuinfo)


def _cpu_fact(name: str, cpuinfo: Path) -> str:
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), "")


def library_path(level: Level) -> Path:
    """The compiled library of `level`: shipped with the package, cached, or compiled now."""
    extra = shlex.split(os.environ.get("CXXFLAGS", ""))
    shipped = _prebuilt_path(level)
    if shipped.exists() and not extra:
        return shipped
    compiler = find_compiler()
    key = fingerprint(level.name, _version(compiler), " ".join([*FLAGS, LINK, *extra]))
    target = cache_folder() / key[:16] / f"kernels-{level.name}.so"
    if not target.exists():
        with _one_at_a_time(target):
            if not target.exists():
                for left in target.parent.glob(f"{UNFINISHED}*"):  # by a process that was killed
                    shutil.rmtree(left, ignore_errors=True)
                compile_to(target, level, compiler, extra)
    return target


@contextmanager
def _one_at_a_time(target: Path) -> Iterator[None]:
    """Other processes that need the same library wait for this one instead of compiling it as
    well."""
    folder = target.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise _not_writable(folder, error) from None
    with lock:
        begin = time.monotonic()
        notice = "waiting for another process, which compiles the CPU kernels"
        while not _is_locked_now(lock, folder):
            waited = time.monotonic() - begin
            if notice and waited >= compilers.NOTICE_SECONDS:
                logger.warning(notice)
                notice = ""
            if waited >= compilers.MAX_COMPILE_SECONDS:
                raise CannotBuild(f"another process compiles them for more than {waited:.0f} s")
            time.sleep(LIBRARY_POLL_SECONDS)
        yield


def _is_locked_now(lock: IO[str], folder: Path) -> bool:
    """Try to lock a file. Raises CannotBuild where the file system has no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise _not_writable(folder, error) from None
    return True


def _not_writable(folder: Path, error: OSError) -> CannotBuild:
    reason = f"{error.strerror or error}; XDG_CACHE_HOME names another folder"
    return CannotBuild(f"they can't be compiled in {folder} ({reason})")


def find_compiler() -> str:
    """$CXX, or the first compiler on the PATH. Raises CannotBuild."""
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise CannotBuild(f"there is no C++ compiler ({wanted or ', '.join(COMPILERS)}) on the PATH")


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/chatjobs/kernels, by default in ~/.cache. Raises CannotBuild."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "chatjobs" / "kernels"
    except RuntimeError:  # neither $HOME nor an entry in the table of users
        raise CannotBuild("there is no home folder for them: set XDG_CACHE_HOME") from None


def compile_to(target: Path, level: Level, compiler: str, extra: list[str]) -> None:
    """Compile into a folder of this process, then rename: others see a whole file or none."""
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda path: not path.name.startswith(SLOWEST))
    options = [compiler, *FLAGS, *level.flags, *extra]
    notice = f"compiling the CPU kernels with {compiler}: this is done once on this machine"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=UNFINISHED) as name:
            folder = Path(name)
            objects = [str(folder / f"{path.stem}.o") for path in sources]
            compilers.run(
                [
                    [*options, "-c", "-o", made, str(source)]
                    for source, made in zip(sources, objects, strict=True)
                ],
                folder,
                notice,
            )
            output = folder / target.name
            compilers.run([[*options, LINK, "-o", str(output), *objects]], folder)
            os.replace(output, target)
    except OSError as error:
        raise _not_writable(target.parent, error) from None


def build_package() -> list[Path]:
    """Compile every level into the package's folder `prebuilt`, which wheels include."""
    shutil.rmtree(PREBUILT, ignore_errors=True)
    compiler = find_compiler()
    paths = [_prebuilt_path(level) for level in LEVELS]
    for level, path in zip(LEVELS, paths, strict=True):
        compile_to(path, level, compiler, [])
    return paths


def _prebuilt_path(level: Level) -> Path:
    return PREBUILT / f"kernels-{level.name}-{_source_key()[:16]}.so"


def fingerprint(*parts: str) -> str:
    """Names the kernels of these sources together with other texts."""
    return _hash(_source_key(), *parts)


def _source_key() -> str:
    return _hash(*(path.read_text(encoding="utf-8") for path in sorted(SOURCES.iterdir())))


def _version(compiler: str) -> str:
    try:
        (text,) = compilers.run([[compiler, "--version"]], notice=f"waiting for {compiler}")
    except OSError as error:
        raise CannotBuild(f"{compiler} doesn't run ({error})") from None
    return text


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


if __name__ == "__main__":
    for built in build_package():
        print(built)
