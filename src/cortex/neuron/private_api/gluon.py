"""Gluon, Triton's lower language, which is an experiment of its authors. Only kernels for one kind of card use it."""

from __future__ import annotations

from functools import cache, partial
from importlib import import_module
from typing import Any

import torch

from cortex.neuron.private_api.triton import GLUON, Kernel

gl: Any = None
ampere: Any = None
hopper: Any = None
Descriptor: Any = None
load_async: Any = None
"""(lines, where, barrier, target): copies a block of what a Descriptor describes into shared memory."""
reinterpreted: Any = None
"""(memory, dtype, shape, layout): the same shared memory with another shape."""
if GLUON.is_usable:
    gl = import_module("triton.experimental.gluon.language")
    ampere = import_module("triton.experimental.gluon.language.nvidia.ampere")
    hopper = import_module("triton.experimental.gluon.language.nvidia.hopper")
    Descriptor = import_module("triton.experimental.gluon.nvidia.hopper").TensorDescriptor
    load_async = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared
    memory: Any = gl.shared_memory_descriptor
    reinterpreted = getattr(memory, "reinterpret", None) or memory._reinterpret


def _decorator() -> Any:
    if not GLUON.is_usable:
        return _identity

    base: Any = import_module("triton.experimental.gluon._runtime").GluonJITFunction

    class GluonKernel(Kernel, base):  # type: ignore[misc]
        """A kernel in Gluon that is compiled ahead like others."""

    def decorate(function: Any = None, **options: Any) -> Any:
        return GluonKernel(function, **options) if function is not None else partial(GluonKernel, **options)

    return decorate


def _identity(function: Any = None, **_: Any) -> Any:
    return function if function is not None else _identity


gluon_jit: Any = _decorator()


@cache
def shared_layout(dtype: torch.dtype) -> Any:
    """How the tensor cores read lines of 128 bytes from shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=dtype.itemsize * 8, rank=2)
