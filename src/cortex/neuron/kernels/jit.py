"""Triton where it is installed. Without it the kernels' modules still import, and only their torch references run.

On Hopper and later a kernel may start while the one before it is still finishing (programmatic dependent launch):
it fetches what does not depend on its predecessor, weights above all, and then waits. Kernels take part when launched
with `launch_options`; they say `gdc_launch_dependents()` first, and `gdc_wait()` before they touch anything that an
earlier kernel of the step wrote or reads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

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
INTERPRETED = TRITON and os.environ.get("TRITON_INTERPRET") == "1"


def _identity(function: Any = None, **_: Any) -> Any:
    return function if function is not None else _identity


jit: Callable[..., Any] = triton.jit if TRITON else _identity


def constant(value: Any) -> Any:
    """A module's value that kernels may read."""
    return tl.constexpr(value) if TRITON else value


def has_kernels(x: Tensor) -> bool:
    """Whether kernels run where `x` lives: on a GPU, or anywhere under Triton's interpreter, as their tests do."""
    return x.is_cuda or INTERPRETED


@cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels on this device can start before their predecessors end."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a launch of a kernel that has the OVERLAP constant."""
    return {"OVERLAP": True, "launch_pdl": True} if overlaps(device) else {"OVERLAP": False}


@cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


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
