"""The functions in C, compiled with the host's C compiler on first use and kept in the cache folder."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from cortex.neuron.private_api.openmp import openmp_functions
from cortex.system.cache_folder import cache_folder

log = logging.getLogger(__name__)

_NAMES = ("values.h", "operations.h", "tiles.h", "products.c", "lookups.c", "attention.c", "experts.c", "steps.c")
_SOURCES = tuple(Path(__file__).with_name(name) for name in _NAMES)
_COMPILE_TIMEOUT_S = 300
_LOCK_TIMEOUT_S = _COMPILE_TIMEOUT_S + 30
"""After it, the process that holds the lock is assumed to hang."""
_LOCK_POLL_S = 0.05
_LOGGED_LINES = 3
"""How much of the compiler's output is logged."""
_NO_SUCH_ROW = 2
"""As in operations.h."""


class NativeMemory(ctypes.Structure):
    """`Matrix` of operations.h."""

    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("table", ctypes.c_char_p),
        ("outputs", ctypes.c_int64),
        ("tiles", ctypes.c_int64),
        ("bits", ctypes.c_int32),
        ("zero", ctypes.c_int32),
        ("has_minimums", ctypes.c_int32),
    )


class _Threads(ctypes.Structure):
    """`Threads` of steps.c."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("parallel", "num_threads", "thread_number"))


class NativeLibrary:
    def __init__(self, library: ctypes.CDLL, threads: _Threads | None) -> None:
        """`threads`: how functions run on torch's own threads; None: they run on one thread."""
        self.library = library
        self._run = library.run
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_uint]
        self._threads = threads
        self._at = None if threads is None else ctypes.addressof(threads)

    def run(self, operations: ctypes.Array[ctypes.c_void_p], rows: int, num_threads: int) -> None:
        """Runs operations on the first `rows` rows of their tensors. `operations`: their addresses.

        Raises MemoryError, or IndexError if a row is looked up that does not exist.
        """
        failed = self._run(operations, len(operations), rows, self._at, num_threads)
        if failed == _NO_SUCH_ROW:
            raise IndexError("a row of a matrix does not exist")
        if failed:
            raise MemoryError("no memory for the inputs of a product, or the scores of an attention")


def compiler() -> str | None:
    """The path of the host's C compiler; None: it has none."""
    return _found_compiler(os.environ.get("CC", "cc"), os.environ.get("PATH"))


@cache  # every estimate of a model asks for it
def _found_compiler(name: str, path: str | None) -> str | None:
    return shutil.which(name, path=path) or shutil.which("gcc", path=path)


def may_have_library() -> bool:
    """Whether this host has the functions in C, or has a compiler that has not failed on them. Loads nothing."""
    command = compiler()
    try:
        return command is not None and not _failure(_built(command)).exists()
    except (OSError, RuntimeError):  # there is no folder for them
        return False


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
        with contextlib.suppress(OSError, RuntimeError):  # the latter without a home folder
            failure = _failure(path := _built(command))
            if library is None:
                failure.touch()
            if library is not None or _opened(path) is not None:  # by another process, since this one has failed
                failure.unlink(missing_ok=True)
    return library


def _load() -> NativeLibrary:
    """Raises OSError, RuntimeError or SubprocessError."""
    if (command := compiler()) is None:
        raise RuntimeError("the host has no C compiler; install gcc or clang")
    path = _built(command)
    library = _opened(path)
    if library is None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        failed_before = _failed_at(path)
        with _locked(path.parent):  # the workers of a divided model start together, and one of them compiles
            if (library := _opened(path)) is None and _failed_at(path) != failed_before:
                raise RuntimeError("another process could not compile them; its log says why")
            library = library or _compiled(command, path)
    return NativeLibrary(library, _threads())


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds a lock of the folder that is shared by all processes, where its file system has locks, and unless another
    process keeps it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
    try:
        with contextlib.suppress(OSError):
            while not _has_locked(descriptor) and time.monotonic() < deadline_s:
                time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _has_locked(descriptor: int) -> bool:
    """Raises OSError."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _compiled(command: str, path: Path) -> ctypes.CDLL:
    """Raises OSError or SubprocessError."""
    try:
        _compile(command, path)
    except (OSError, subprocess.SubprocessError):  # such as a time-out, while another process has compiled them
        if (library := _opened(path)) is None:
            _failure(path).touch()  # before the lock is free, for those that wait for it
            raise
        return library
    return ctypes.CDLL(str(path))


def _options() -> tuple[str, ...]:
    tune = "-mcpu=native" if platform.machine() == "aarch64" else "-march=native"
    # Contracted operations would make a row depend on how many others there are.
    return ("-O3", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno", tune, "-shared", "-fPIC")


def _built(command: str) -> Path:
    """Where the functions are once this compiler has compiled them."""
    return cache_folder() / "kernels" / f"native-{_digest(command)}.so"


def _failure(path: Path) -> Path:
    """Exists if they could not be compiled or opened, for `may_have_library`."""
    return path.with_suffix(".failed")


def _failed_at(path: Path) -> int | None:
    """When they could not be compiled the last time; None: they could."""
    try:
        return _failure(path).stat().st_mtime_ns
    except FileNotFoundError:
        return None


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


def is_private(path: Path) -> bool:
    """Whether only this user and root may write the file or folder. Raises OSError."""
    found = path.lstat()
    return found.st_uid in (os.geteuid(), 0) and not (
        found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or stat.S_ISLNK(found.st_mode)
    )


def _opened(path: Path) -> ctypes.CDLL | None:
    """None if there is no such file, or a damaged one: a host that loses power may keep an empty file. None also for
    one that another user may have written: it would run with the rights of this process."""
    try:
        return ctypes.CDLL(str(path)) if is_private(path.parent) and is_private(path) else None
    except OSError:
        return None


def _compile(command: str, path: Path) -> None:
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


def _threads() -> _Threads | None:
    """How functions run on torch's own threads."""
    functions = openmp_functions()
    return None if functions is None else _Threads(*functions)
