"""Compiles the kernels: for this CPU at first use, or for every kind of CPU into the package.

    python -m worker.kernels.build        # before `pip wheel`: prebuilt kernels for x86-64 Linux

There is one library for all models, and one for each format of quantised weights, which is
compiled when a model has weights in it: of many formats, a model has two or three. A compiled
library lies in a folder of the user's cache that is named by the hash of the sources, the flags,
the compiler and the kind of CPU. Of several processes that need it one compiles, with one compiler
per source file and core, and renames the complete file into place, durably. A file that is damaged
is compiled again.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

from jobs.disk import sync_folder
from worker.kernels import compilers
from worker.kernels.compilers import CannotBuild, CompilerFailed, UnknownFlags
from worker.kernels.formats import FORMATS

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
# What is compiled; other sources are included. For a format, FORMAT is defined as its name.
UNITS = ("all_attention.cpp", "all_others.cpp")
FORMAT_UNIT = "quantised_format.cpp"
# Of the header of a library: its magic number, and where its table of sections is, with the size
# and the number of the entries.
ELF_HEADER, ELF_MAGIC = struct.Struct("<4s36xQ10xHH2x"), b"\x7fELF"
UNFINISHED = "build-"  # how the names of folders begin in which a library is built
LIBRARY_POLL_SECONDS = 0.2  # between two looks at whether another process has compiled the library


@dataclass(frozen=True)
class Level:
    """A kind of CPU: the features that it needs, as in /proc/cpuinfo, and the compiler's flags."""

    name: str
    features: frozenset[str]
    flags: tuple[str, ...]

    @property
    def is_wide(self) -> bool:
        """True if vectors have 512 bits. Then products with bf16 weights have several ways."""
        return "avx512_vnni" in self.features

    @property
    def has_pairs(self) -> bool:
        """True if there are products of pairs of bf16."""
        return "avx512_bf16" in self.features


def _level(name: str, *features: str) -> Level:
    flags = tuple(
        f"-m{feature.replace('avx512_', 'avx512').replace('avx_', 'avx').replace('_', '-')}"
        for feature in features
    )
    return Level(name, frozenset(features), flags)


AVX2_FEATURES = ("avx2", "fma", "f16c")
VNNI_FEATURES = (
    *AVX2_FEATURES,
    *("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"),
)
AVX2 = _level("avx2", *AVX2_FEATURES)
AVXVNNI = _level("avxvnni", *AVX2_FEATURES, "avx_vnni")
AVX512VNNI = _level("avx512vnni", *VNNI_FEATURES)
AVX512 = _level("avx512", *VNNI_FEATURES, "avx512_bf16")
AMX = _level("amx", *VNNI_FEATURES, "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")
LEVELS = (AMX, AVX512, AVX512VNNI, AVXVNNI, AVX2)  # best first


def usable_levels(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[Level]:
    """The levels that this CPU has all features of, best first."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    features = set(_cpu_fact("flags", cpuinfo).split())
    return [level for level in LEVELS if level.features <= features]


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


def library_path(level: Level, format_name: str | None = None) -> Path:
    """See `library_paths`."""
    (path,) = library_paths(level, [format_name])
    return path


def library_paths(level: Level, formats: Sequence[str | None]) -> list[Path]:
    """The compiled libraries of `level`, for each of these formats of quantised weights; None: for
    all models. They are shipped with the package, cached, or compiled now, all at once. Raises
    CannotBuild."""
    extra = shlex.split(os.environ.get("CXXFLAGS", ""))
    shipped = [_prebuilt_path(level, form) for form in formats]
    if not extra and all(path.exists() for path in shipped):
        return shipped
    compiler = find_compiler()
    key = fingerprint(level.name, _version(compiler), " ".join([*FLAGS, LINK, *extra]))
    folder = cache_folder() / key[:16]
    targets = {form: folder / f"kernels-{_suffix(level, form)}.so" for form in formats}
    if not all(map(is_whole, targets.values())):
        with _one_at_a_time(folder):
            missing = {form: path for form, path in targets.items() if not is_whole(path)}
            if missing:
                for left in folder.glob(f"{UNFINISHED}*"):  # by a process that was killed
                    shutil.rmtree(left, ignore_errors=True)
                compile_to(missing, level, compiler, extra)
    return list(targets.values())


def is_whole(library: Path) -> bool:
    """True if a library is there and not cut off, as one of an older version may be after a power
    cut. Linkers write the table of sections last."""
    try:
        with library.open("rb") as file:
            header = file.read(ELF_HEADER.size)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return False
    if len(header) < ELF_HEADER.size:
        return False
    magic, table, entry, entries = ELF_HEADER.unpack(header)
    return bool(magic == ELF_MAGIC and table + entry * entries <= size)


def _suffix(level: Level, format_name: str | None) -> str:
    return level.name if format_name is None else f"{level.name}-{format_name}"


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Other processes that need libraries in the same folder wait for this one instead of compiling
    them as well."""
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


def compile_to(
    targets: Mapping[str | None, Path], level: Level, compiler: str, extra: list[str]
) -> None:
    """Compile the libraries of these formats, see `library_paths`, whose files lie in one folder.
    First into a folder of this process, then rename: others see whole files or none."""
    options = [compiler, *FLAGS, *level.flags, *extra]
    names = ", ".join(form for form in targets if form)
    what = f"the CPU kernels for {names}" if names else "the CPU kernels"
    notice = f"compiling {what} with {compiler}: this is done once on this machine"
    place = next(iter(targets.values())).parent
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place, prefix=UNFINISHED) as name:
            folder = Path(name)
            compiling, linking = [], []
            for form, target in targets.items():
                objects = []
                defined = [] if form is None else [f"-DFORMAT={form}"]
                for unit in UNITS if form is None else (FORMAT_UNIT,):
                    objects.append(str(folder / f"{target.stem}-{Path(unit).stem}.o"))
                    source = str(SOURCES / unit)
                    compiling.append([*options, *defined, "-c", "-o", objects[-1], source])
                linking.append([*options, LINK, "-o", str(folder / target.name), *objects])
            try:
                compilers.run(compiling, folder, notice)
            except CompilerFailed:
                _require_flags(compiler, level)
                raise
            compilers.run(linking, folder)
            for target in targets.values():
                with (folder / target.name).open("rb") as linked:
                    os.fsync(linked.fileno())  # else a power cut may leave the name of a part
                os.replace(folder / target.name, target)
            sync_folder(place)
    except OSError as error:
        raise _not_writable(place, error) from None


def _require_flags(compiler: str, level: Level) -> None:
    """Raises UnknownFlags."""
    try:
        compilers.run([[compiler, *level.flags, "-E", "-x", "c++", os.devnull]])
    except CompilerFailed as error:
        raise UnknownFlags(str(error)) from None


def build_package() -> list[Path]:
    """Compile every level into the package's folder `prebuilt`, which wheels include."""
    shutil.rmtree(PREBUILT, ignore_errors=True)
    compiler, built = find_compiler(), list[Path]()
    for level in LEVELS:
        targets = {form: _prebuilt_path(level, form) for form in (None, *FORMATS)}
        compile_to(targets, level, compiler, [])
        built += targets.values()
    return built


def _prebuilt_path(level: Level, format_name: str | None) -> Path:
    return PREBUILT / f"kernels-{_suffix(level, format_name)}-{_source_key()[:16]}.so"


def fingerprint(*parts: str) -> str:
    """Names the kernels of these sources together with other texts."""
    return _hash(_source_key(), *parts)


def _source_key() -> str:
    return _hash(*(path.read_text(encoding="utf-8") for path in sorted(SOURCES.iterdir())))


@cache
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
