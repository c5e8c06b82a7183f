"""Loads the compiled kernels once per process, and says which way layers compute."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from worker.kernels import build
from worker.kernels.build import Level
from worker.kernels.compilers import CannotBuild, UnknownFlags
from worker.kernels.formats import FORMATS

log = logging.getLogger(__name__)

# The codes of element types in src/simd.h.
TYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}

# Parameters of the exported functions in order: p pointer, l int64, i int, f float.
SIGNATURES = {
    "pack_rows": "ippll i",
    "quantised_linear": "plll i pipl plp ii",
    "unpack_rows": "ippp ll ii",
    "dense_linear": "plll ppl pl p iii",
    "rms_norm": "plppp plifi ii",
    "delta_convolve": "pppl pp lil ii",
    "delta_recur": "pppppp l iiii i",
    "add_tensors": "pplp lii i",
    "gated_activation": "pplp lii ff ii",
    "prepare_queries_and_keys": "plplp pffpp ipp liii iii",
    "attend_decode": "plplpl ppp ppp p lll iii ff iii",
    "attend_chunks": "plplpl ppp pl pp ll iii ff iii",
    "argmax": "plppll ii",
    "gather_rows": "pll pp ll",
    "select_experts": "plpl iii pp ii",
    "add_biases": "ppp iii",
    "group_by_expert": "pl ii ppp",
    "combine_experts": "ppp lii p ii",
    "add_to_integers": "plpl",
    "multiply": "pfpli",
    "copy_rows": "plpl ll",
    "exchange_sum": "pii pl ii",
    "exchange_first": "pii plll",
    "exchange_gather": "pii pp ll",
}
_KINDS: dict[str, Any] = {"p": c_void_p, "l": c_int64, "i": c_int, "f": c_float}
PARAMETERS = {
    name: [_KINDS[kind] for kind in kinds.replace(" ", "")] for name, kinds in SIGNATURES.items()
}
SLOWER = "several times as long, and with quantised weights many times as long"
_thread = threading.local()  # .kernels: what `require` returns in this thread, if it is set


class Library:
    """The functions of one compiled library, with their parameter types."""

    pack_rows: Callable[..., None]
    packed_bytes: Callable[[int, int, int], int]
    quantised_linear: Callable[..., None]
    unpack_rows: Callable[..., None]
    dense_linear: Callable[..., None]
    rms_norm: Callable[..., None]
    delta_convolve: Callable[..., None]
    delta_recur: Callable[..., None]
    add_tensors: Callable[..., None]
    gated_activation: Callable[..., None]
    prepare_queries_and_keys: Callable[..., None]
    attend_decode: Callable[..., None]
    attend_chunks: Callable[..., None]
    argmax: Callable[..., None]
    gather_rows: Callable[..., None]
    select_experts: Callable[..., None]
    add_biases: Callable[..., None]
    group_by_expert: Callable[..., None]
    combine_experts: Callable[..., None]
    add_to_integers: Callable[..., None]
    multiply: Callable[..., None]
    copy_rows: Callable[..., None]
    exchange_sum: Callable[..., None]
    exchange_first: Callable[..., None]
    exchange_gather: Callable[..., None]
    call_all: Callable[[int, int], None]

    def __init__(self, level: Level) -> None:
        """Raises CannotBuild."""
        self.level = level
        self._usable: dict[str, bool] = {}  # formats of quantised weights
        # torch has loaded its own libgomp already; the library's reference resolves to it, so that
        # both share one team of threads.
        self._handle = _opened(build.library_path(level))
        for name, parameters in PARAMETERS.items():
            function = getattr(self._handle, name)
            function.argtypes = parameters
            function.restype = None
            setattr(self, name, function)
        # Where each function is that takes its arguments as words, for `call_all`.
        self.from_words = {
            name: ctypes.cast(self._handle[f"{name}_from_words"], c_void_p).value or 0
            for name in PARAMETERS
        }
        self.call_all = self._handle.call_all
        self._handle.call_all.argtypes = [c_void_p, c_int64]
        self._handle.call_all.restype = None
        self.packed_bytes = self._handle.packed_bytes
        self._handle.packed_bytes.argtypes = [c_int, c_int64, c_int64]
        self._handle.packed_bytes.restype = c_int64
        self._handle.use_format.argtypes = [c_int, c_void_p]
        self._handle.use_format.restype = None

    def use(self, format_name: str) -> None:
        """Load the kernels of a format of quantised weights, compiled if they are not there yet.
        Functions that take a format need it. Raises CannotBuild."""
        if self._usable.get(format_name):
            return
        # Its functions stay in memory: ctypes closes no library.
        kernels = _opened(build.library_path(self.level, format_name)).format_kernels
        kernels.restype = c_void_p
        self._handle.use_format(FORMATS[format_name][0], kernels())
        self._usable[format_name] = True

    def uses(self, format_name: str) -> bool:
        """True if the kernels of a format are loaded or could be. The log says once why not."""
        if format_name not in self._usable:
            try:
                self.use(format_name)
            except CannotBuild as error:
                self._usable[format_name] = False
                log.warning("no kernel multiplies with weights in %s: %s", format_name, error)
        return self._usable[format_name]


def _opened(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CannotBuild(f"the compiled library can't be loaded ({error})") from None


@cache
def active() -> Library | None:
    """The kernels for this CPU, compiled if they are not there yet. None: compute with torch."""
    try:
        return load()
    except CannotBuild as error:
        log.warning(
            "computing with torch alone, because %s: on CPUs decoding takes %s", error, SLOWER
        )
        return None


def require() -> Library:
    """The kernels, where `serves` has been checked."""
    library: Library | None = getattr(_thread, "kernels", None) or active()
    assert library is not None
    return library


@contextmanager
def replaced(kernels: Library) -> Iterator[None]:
    """Let `require` return other kernels in this thread."""
    _thread.kernels = kernels
    try:
        yield
    finally:
        del _thread.kernels


def load() -> Library:
    """The kernels of the best level that this CPU has and that the compiler knows. Raises
    CannotBuild."""
    levels = build.usable_levels()
    if not levels:
        raise CannotBuild("this CPU has no AVX2")
    reason: UnknownFlags | None = None
    for level in levels:
        try:
            found = Library(level)
        except UnknownFlags as error:
            reason = reason or error
            continue
        if reason is not None:
            log.warning(
                "the CPU kernels are those of %s and not of %s, because %s: a newer compiler makes "
                "faster ones",
                level.name,
                levels[0].name,
                reason,
            )
        return found
    assert reason is not None
    raise reason


def prepare(formats: Collection[str]) -> None:
    """Compile what a model with weights in these formats needs, all at once, where it is not there
    yet. If that fails, `active` and `Library.uses` say why."""
    for level in build.usable_levels():
        try:
            build.library_paths(level, [None, *formats])
        except UnknownFlags:
            continue
        except CannotBuild:
            pass
        return


def description() -> str:
    """Describes for people how CPUs compute here."""
    library = active()
    if library is None:
        return f"torch alone (the log says why): decoding takes {SLOWER}"
    return f"native, {library.level.name}"


def serves(x: Tensor) -> bool:
    """True if the kernels can read `x`: a plain CPU tensor of a known type."""
    return x.is_cpu and type(x) is Tensor and x.dtype in TYPE_CODES and active() is not None
