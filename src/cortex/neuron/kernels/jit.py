"""Triton where it is installed. Without it the kernels' modules still import, and only their torch references run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl

    TRITON = True
except ImportError:  # CPU installs of torch come without Triton
    triton = tl = None
    TRITON = False

jit: Callable[..., Any] = triton.jit if TRITON else (lambda function: function)

__all__ = ["TRITON", "jit", "tl", "triton"]
