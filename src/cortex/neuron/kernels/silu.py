"""silu(gate) · up, for gate and up side by side in one tensor."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, has_kernels, jit, launch_options, tl, triton


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up: [tokens, 2 · size] → [tokens, size]"""
    if not has_kernels(gate_up):
        return silu_mul_reference(gate_up)
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    block = 1024
    _silu_mul_kernel[(tokens, triton.cdiv(size, block))](
        gate_up, out, size, BLOCK=block, num_warps=4, **launch_options(out.device)
    )
    return out


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@jit
def _silu_mul_kernel(gate_up, out, size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up + token * 2 * size + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up + token * 2 * size + size + column, mask=inside).to(tl.float32)
    tl.store(out + token * size + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)
