"""The functions in C, compiled with the host's C compiler on first use and kept in the cache folder."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("numbers.h", "products.c", "attention.c"))
_COMPILE_TIMEOUT_S = 120
_LOGGED_LINES = 3
"""Of what the compiler wrote."""


class NativeMemory(ctypes.Structure):
    """`Matrix` of products.c."""

    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("table", ctypes.c_char_p),
        ("outputs", ctypes.c_int64),
        ("tiles", ctypes.c_int64),
        ("bits", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("zero", ctypes.c_int32),
        ("has_minimums", ctypes.c_int32),
    )


class NativeCall(ctypes.Structure):
    """`Call` of products.c."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("is_gated", ctypes.c_int32),
        ("is_half", ctypes.c_int32),
        ("is_norm_half", ctypes.c_int32),
    )


class NativeAttention(ctypes.Structure):
    """`Attention` of attention.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "key_pages", "value_pages", "out")),
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm", "rope")),
        *((name, ctypes.c_void_p) for name in ("positions", "slots", "lengths", "page_table")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "kv_heads", "dim", "rotated_dims", "page_tokens")),
        *((name, ctypes.c_int64) for name in ("table_columns", "window")),
        *((name, ctypes.c_int64) for name in ("q_stride", "q_head_stride", "k_stride", "v_stride")),
        ("scale", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("is_half", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    attention: Callable[..., int]
    product: Callable[..., int]
    looked_up_rows: Callable[..., int]
    parallel: int | None
    """Address of the function that runs another one on torch's own threads; None: one thread only."""


def compiler() -> str | None:
    """The path of the host's C compiler; None: it has none."""
    return shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")


def may_have_library() -> bool:
    """Whether this host has the functions in C, or has a compiler that has not failed on them. Loads nothing."""
    command = compiler()
    return command is not None and not _failure(_built(command)).exists()


def native_library() -> NativeLibrary:
    """Raises NotImplementedError where the functions cannot be compiled."""
    if (library := native_library_or_none()) is None:
        raise NotImplementedError("the functions in C could not be compiled")
    return library


@cache
def native_library_or_none() -> NativeLibrary | None:
    """None where the functions cannot be compiled. The reason is logged, and this process does not try again."""
    try:
        library = _load()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        output = (getattr(error, "stderr", None) or b"").decode(errors="replace").splitlines()
        output = [line for line in output if "error" in line] or output
        reason = "; ".join((str(error), *output[:_LOGGED_LINES]))
        log.warning("the functions in C are not available, CPUs use slower ones: %s", reason)
        library = None
    if (command := compiler()) is not None:
        with contextlib.suppress(OSError):
            failure = _failure(_built(command))
            failure.unlink(missing_ok=True) if library is not None else failure.touch()
    return library


def _load() -> NativeLibrary:
    """Raises OSError, RuntimeError or SubprocessError."""
    if (command := compiler()) is None:
        raise RuntimeError("the host has no C compiler; install gcc or clang")
    path = _built(command)
    library = _opened(path)
    if library is None:
        _compile(command, path)
        library = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    matrix = ctypes.POINTER(NativeMemory)
    library.product.argtypes = [matrix, ctypes.POINTER(NativeCall), pointer, ctypes.c_int]
    library.looked_up_rows.argtypes = [matrix, pointer, number, pointer]
    library.decode_attention.argtypes = [ctypes.POINTER(NativeAttention), pointer, ctypes.c_int]
    return NativeLibrary(library.decode_attention, library.product, library.looked_up_rows, _parallel())


def _options() -> tuple[str, ...]:
    tune = "-mcpu=native" if platform.machine() == "aarch64" else "-march=native"
    # Contracted operations would make a row depend on how many others there are.
    return ("-O3", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno", tune, "-shared", "-fPIC")


def _built(command: str) -> Path:
    """Where the functions are once this compiler has compiled them."""
    return _folder() / f"native-{_digest(command)}.so"


def _failure(path: Path) -> Path:
    """Exists if they could not be compiled or opened, for `may_have_library`."""
    return path.with_suffix(".failed")


@cache
def _digest(command: str) -> str:
    # A home folder may be shared by hosts with different processors.
    features = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Feat"))]
    parts = (
        *(source.read_bytes() for source in _SOURCES),
        command.encode(),
        *(text.encode() for text in (*_options(), *features[:1])),
    )
    return hashlib.sha256(b"|".join(parts)).hexdigest()[:24]


def _opened(path: Path) -> ctypes.CDLL | None:
    """None if there is no such file, or a damaged one: a host that loses power may keep an empty file."""
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def _folder() -> Path:
    environment = os.environ
    own = environment.get("CORTEX_CACHE")
    return Path(own or Path(environment.get("XDG_CACHE_HOME", "~/.cache")) / "cortex").expanduser() / "kernels"


def _compile(command: str, path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        log.info("compiling the functions in C for this host, once: %s", command)
        built = Path(folder) / path.name
        arguments = [
            command,
            *_options(),
            *(str(source) for source in _SOURCES if source.suffix == ".c"),
            "-o",
            str(built),
        ]
        environment = {**os.environ, "TMPDIR": folder}  # a sandbox may have no other writable folder
        subprocess.run(arguments, check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_S, env=environment)
        built.replace(path)  # at once, for processes that compile the same


def _parallel() -> int | None:
    """`GOMP_parallel` of the library that torch has loaded. With another one there would be two sets of threads."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if "libgomp" in path.rpartition("/")[2]:
            function = ctypes.CDLL("/" + path).GOMP_parallel
            return ctypes.cast(function, ctypes.c_void_p).value
    return None
