"""Triton where it is installed. Without it the kernels' modules still import, and only their torch references run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import Tensor

triton: Any = None
tl: Any = None
try:
    import triton
    import triton.language as tl
except ImportError:  # CPU installs of torch come without Triton
    pass
TRITON = triton is not None


def _leave(function: Any = None, **_: Any) -> Any:
    return function if function is not None else _leave


jit: Callable[..., Any] = triton.jit if TRITON else _leave

INTERPRETED = TRITON and os.environ.get("TRITON_INTERPRET") == "1"


def has_kernels(x: Tensor) -> bool:
    """Whether kernels run where `x` lives: on a GPU, or anywhere under Triton's interpreter, as their tests do."""
    return x.is_cuda or INTERPRETED


__all__ = ["TRITON", "has_kernels", "jit", "tl", "triton"]
