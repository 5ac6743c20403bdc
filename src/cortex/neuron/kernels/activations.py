"""The activations of gated feed-forward blocks: activation(gate) · up, or what a family has in its place. Blocks
without a gate have relu(x)².

A new one is an entry of `_FUNCTIONS` (torch), a branch of `activated` (Triton) and one of `activated` in
`native/values.h` (C). The order of `_FUNCTIONS` numbers them; 0 stands for none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.jit import (
    constant,
    gdc_launch_dependents,
    gdc_wait,
    has_kernels,
    jit,
    launch_options,
    tl,
    triton,
)


def _clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=7.0)
    return (up.clamp(-7.0, 7.0) + 1).mul_(gate * torch.sigmoid(1.702 * gate))


_FUNCTIONS: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "silu": lambda gate, up: F.silu(gate).mul_(up),
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh").mul_(up),
    "clamped_swiglu": _clamped_swiglu,
}
ACTIVATIONS: Final = tuple(_FUNCTIONS)
_SILU = constant(1)
_CLAMPED_SWIGLU = constant(3)


def activation_number(activation: str | None) -> int:
    """The number of one of `ACTIVATIONS` in Triton and C; 0: none."""
    return 0 if activation is None else ACTIVATIONS.index(activation) + 1


def activate(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up: [tokens, 2 · size], the gate first → activation(gate) · up: [tokens, size]"""
    if not has_kernels(gate_up):
        return activate_reference(gate_up, activation)
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    block = 1024
    _activate_kernel[(tokens, triton.cdiv(size, block))](
        gate_up,
        out,
        size,
        ACTIVATION=activation_number(activation),
        BLOCK=block,
        num_warps=4,
        **launch_options(out.device),
    )
    return out


def activate_reference(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return _FUNCTIONS[activation](gate, up)


@jit
def activated(gate, up, ACTIVATION: tl.constexpr):
    """activation(gate) · up in float32, for all kernels. (1 + tanh(x)) / 2 is the sigmoid of 2 x."""
    if ACTIVATION == _SILU:
        weight = tl.sigmoid(gate)
    elif ACTIVATION == _CLAMPED_SWIGLU:
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
        weight = tl.sigmoid(1.702 * gate)
    else:
        weight = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return gate * weight * up


@jit
def _activate_kernel(gate_up, out, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up + token * 2 * size + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up + token * 2 * size + size + column, mask=inside).to(tl.float32)
    tl.store(out + token * size + column, activated(gate, up, ACTIVATION).to(out.dtype.element_ty), mask=inside)


def relu_squared_(x: Tensor) -> Tensor:
    """In place. x: contiguous, any shape → the same tensor"""
    if not has_kernels(x):
        return relu_squared_reference_(x)
    block = 1024
    _relu_squared_kernel[(triton.cdiv(x.numel(), block),)](
        x, x.numel(), BLOCK=block, num_warps=4, **launch_options(x.device)
    )
    return x


def relu_squared_reference_(x: Tensor) -> Tensor:
    return x.relu_().square_()


@jit(do_not_specialize=["count"])
def _relu_squared_kernel(x, count, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()  # only now: the next kernel may read the lists of pairs at once
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place, mask=place < count, other=0.0).to(tl.float32)
    value = tl.where(value > 0.0, value * value, tl.where(value == value, 0.0, value))
    tl.store(x + place, value.to(x.dtype.element_ty), mask=place < count)
