"""Triton, if it is installed. Without it the kernel modules can still be imported, and only the torch references run.

On Hopper and later a kernel may start before its predecessor ends (programmatic dependent launch). It first loads data
that does not depend on its predecessor, mainly weights, and then waits. A kernel launched with `launch_options` calls
`gdc_launch_dependents()` first. It calls `gdc_wait()` before it reads what an earlier kernel of the step writes, and
before it writes what an earlier kernel reads or writes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cortex.neuron.kernels.device_facts import facts_of

triton: Any = None
tl: Any = None
gdc_wait: Any = None
gdc_launch_dependents: Any = None
try:
    triton, tl = import_module("triton"), import_module("triton.language")
    gdc = import_module("triton.language.extra.cuda")
    gdc_wait, gdc_launch_dependents = gdc.gdc_wait, gdc.gdc_launch_dependents
except ImportError:  # CPU installs of torch come without Triton
    pass
TRITON = triton is not None


def key_of_record(record: str) -> str | None:
    """A digest of the digests that an installer has recorded of Triton's files, its compiler among them. None: it has
    not."""
    files = sorted(line for line in record.splitlines() if line.startswith("triton/") and ",sha256=" in line)
    if not any(line.startswith("triton/_C/libtriton.") for line in files):
        return None
    return hashlib.sha256("\n".join(files).encode()).hexdigest()


def _use_recorded_key() -> None:
    """Triton's cache is keyed by a digest of its own files. Each process would read half a gigabyte for it before its
    first kernel, in every thread that compiles; the record of the installed wheel says the same,
    except of files that were edited in place."""
    try:
        installed = metadata.distribution("triton")
    except metadata.PackageNotFoundError:
        return
    is_imported = Path(str(installed.locate_file("triton/__init__.py"))).resolve() == Path(triton.__file__).resolve()
    key = key_of_record(installed.read_text("RECORD") or "")
    if is_imported and key is not None and hasattr(triton.runtime.cache, "triton_key"):
        triton.runtime.cache.triton_key = lambda: f"{triton.__version__}-{key}"


if TRITON:
    _use_recorded_key()
INTERPRETED = TRITON and os.environ.get("TRITON_INTERPRET") == "1"


def _identity(function: Any = None, **_: Any) -> Any:
    return function if function is not None else _identity


class Kernel(triton.JITFunction if TRITON else object):  # type: ignore[misc]
    """A kernel that is compiled. Its `run` is replaced where launches are only to be compiled (`compilation.py`)."""

    def prepare_cache(self) -> None:
        """Makes the cache of the current device, which two threads must not do at the same time."""
        self.device_caches[triton.runtime.driver.active.get_current_device()]


def _compiled(function: Any = None, **options: Any) -> Any:
    return Kernel(function, **options) if function is not None else partial(Kernel, **options)


jit: Callable[..., Any] = (triton.jit if INTERPRETED else _compiled) if TRITON else _identity


def constant(value: Any) -> Any:
    """A module-level value that kernels may read."""
    return tl.constexpr(value) if TRITON else value


def has_kernels(x: Tensor) -> bool:
    """Whether kernels run on the device of `x`: on a GPU, or on any device under Triton's interpreter (in tests). On
    the `meta` device they are compiled."""
    return x.is_cuda or x.is_meta or INTERPRETED


@cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels on this device can start before their predecessor ends."""
    return facts_of(device).capability >= (9, 0)


def launch_options(device: torch.device) -> dict[str, Any]:
    """Keyword arguments to launch a kernel that has the constant OVERLAP."""
    return {"OVERLAP": True, "launch_pdl": True} if overlaps(device) else {"OVERLAP": False}


@cache
def num_processors(device: torch.device) -> int:
    """The number of streaming multiprocessors of a GPU."""
    return facts_of(device).num_processors


__all__ = [
    "TRITON",
    "Kernel",
    "constant",
    "gdc_launch_dependents",
    "gdc_wait",
    "has_kernels",
    "jit",
    "launch_options",
    "num_processors",
    "overlaps",
    "tl",
    "triton",
]
