"""Triton, if it is installed. Without it the kernel modules can still be imported, and only the torch references run.

On Hopper and later a kernel may start before its predecessor ends (programmatic dependent launch). It first loads data
that does not depend on its predecessor, mainly weights, and then waits. A kernel launched with `launch_options` calls
`gdc_launch_dependents()` first. It calls `gdc_wait()` before it reads what an earlier kernel of the step writes, and
before it writes what an earlier kernel reads or writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from cortex.neuron.kernels.device_properties import properties_of
from cortex.neuron.private_api.triton import COLLECTED_LAUNCHES, Kernel, triton, use_recorded_key

tl: Any = None
gdc_wait: Any = None
gdc_launch_dependents: Any = None
try:
    tl = import_module("triton.language")
    gdc = import_module("triton.language.extra.cuda")
    gdc_wait, gdc_launch_dependents = gdc.gdc_wait, gdc.gdc_launch_dependents
except ImportError:  # CPU installs of torch come without Triton
    pass
TRITON = triton is not None


if TRITON:
    use_recorded_key()
INTERPRETED = TRITON and os.environ.get("TRITON_INTERPRET") == "1"


def _identity(function: Any = None, **_: Any) -> Any:
    return function if function is not None else _identity


def _compiled(function: Any = None, **options: Any) -> Any:
    return Kernel(function, **options) if function is not None else partial(Kernel, **options)


def _decorator(*, interpreted: bool) -> Callable[..., Any]:
    if not TRITON:
        return _identity
    return _compiled if COLLECTED_LAUNCHES.is_usable and not interpreted else triton.jit


jit: Callable[..., Any] = _decorator(interpreted=INTERPRETED)


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
    return properties_of(device).capability >= (9, 0)


def launch_options(device: torch.device) -> dict[str, Any]:
    """Keyword arguments to launch a kernel that has the constant OVERLAP."""
    return {"OVERLAP": True, "launch_pdl": True} if overlaps(device) else {"OVERLAP": False}


@cache
def num_processors(device: torch.device) -> int:
    """The number of streaming multiprocessors of a GPU."""
    return properties_of(device).num_processors


__all__ = [
    "TRITON",
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
