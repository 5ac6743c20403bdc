"""The OpenMP library that torch has loaded. With another one there would be two sets of threads. Imports no torch."""

from __future__ import annotations

import ctypes
from pathlib import Path

from cortex.neuron.private_api.entries import PrivateEntry, Unusable


def _probe() -> None:
    if _find() is None:
        raise Unusable("this build of torch has loaded no libgomp")


OPENMP = PrivateEntry(
    "the OpenMP library of torch (libgomp)", "operations in C run on one thread", _probe, kinds=("cpu",)
)


def openmp_functions() -> tuple[int, int, int] | None:
    """The addresses of `GOMP_parallel`, `omp_get_num_threads` and `omp_get_thread_num`; None: they cannot be found. For
    a process that has imported torch."""
    return _find() if OPENMP.is_usable else None


def _find() -> tuple[int, int, int] | None:
    """Raises OSError or AttributeError."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if "libgomp" in path.rpartition("/")[2]:
            library = ctypes.CDLL("/" + path)
            functions = (library.GOMP_parallel, library.omp_get_num_threads, library.omp_get_thread_num)
            parallel, count, number = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
            return parallel, count, number
    return None


ENTRIES = (OPENMP,)
