"""Products of each head with a matrix of its own: queries with the keys' part of `kv_b_proj`, latents with the values'.

Small batches read each matrix once, bound by bandwidth. For larger ones the library's batched product is faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton

MAX_ROWS = 64
"""Up to this many rows, the kernel is used."""
ROWS_AT_ONCE = 16
BLOCK_ELEMENTS = 8 << 10
"""Weights of one program: small enough that a layer's matrices fill a device."""


def product_by_head(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out[t, h, :outputs] = weight[h] · x[t, h, :inputs].

    weight: [heads, outputs, inputs], any strides; x and out may have more columns, and are dense in the last dimension.
    """
    rows, heads, _ = x.shape
    _, outputs, inputs = weight.shape
    if rows > MAX_ROWS:
        factors = x[..., :inputs].transpose(0, 1), weight.transpose(1, 2)
        if out.is_cuda:
            torch.bmm(*factors, out=out[..., :outputs].transpose(0, 1))
        else:
            out[..., :outputs] = torch.bmm(*factors).transpose(0, 1)
        return
    inputs_block = max(16, triton.next_power_of_2(inputs))
    outputs_block = max(16, min(triton.next_power_of_2(outputs), BLOCK_ELEMENTS // inputs_block))
    _by_head_kernel[(triton.cdiv(outputs, outputs_block), heads, triton.cdiv(rows, ROWS_AT_ONCE))](
        x,
        weight,
        out,
        rows,
        *x.stride()[:2],
        *weight.stride(),
        *out.stride()[:2],
        INPUTS=inputs,
        INPUTS_BLOCK=inputs_block,
        OUTPUTS=outputs,
        OUTPUTS_BLOCK=outputs_block,
        ROWS=1 if rows == 1 else ROWS_AT_ONCE,
        num_warps=4,
        **launch_options(x.device),
    )


def product_by_head_reference(x: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("thi,hoi->tho", x[..., : weight.shape[2]], weight)


@jit(do_not_specialize=["rows"])
def _by_head_kernel(
    x,
    weight,
    out,
    rows,
    x_row_stride,
    x_head_stride,
    weight_head_stride,
    weight_output_stride,
    weight_input_stride,
    out_row_stride,
    out_head_stride,
    INPUTS: tl.constexpr,
    INPUTS_BLOCK: tl.constexpr,
    OUTPUTS: tl.constexpr,
    OUTPUTS_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per head, block of outputs and ROWS rows. The weights do not depend on earlier kernels."""
    if OVERLAP:
        gdc_launch_dependents()
    output = tl.program_id(0) * OUTPUTS_BLOCK + tl.arange(0, OUTPUTS_BLOCK)
    head = tl.program_id(1)
    input = tl.arange(0, INPUTS_BLOCK)
    place = input[:, None] * weight_input_stride + output[None, :] * weight_output_stride
    inside = (input < INPUTS)[:, None] & (output < OUTPUTS)[None, :]
    block = tl.load(weight + head.to(tl.int64) * weight_head_stride + place, mask=inside, other=0.0)
    if OVERLAP:
        gdc_wait()
    if ROWS == 1:
        value = tl.load(x + head * x_head_stride + input, mask=input < INPUTS, other=0.0).to(tl.float32)
        total = tl.sum(block.to(tl.float32) * value[:, None], 0)
        tl.store(out + head * out_head_stride + output, total.to(out.dtype.element_ty), mask=output < OUTPUTS)
    else:
        row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        source = x + row[:, None] * x_row_stride + head * x_head_stride + input[None, :]
        value = tl.load(source, mask=(row < rows)[:, None] & (input < INPUTS)[None, :], other=0.0)
        totals = tl.dot(value, block)
        target = out + row[:, None] * out_row_stride + head * out_head_stride + output[None, :]
        is_output = (row < rows)[:, None] & (output < OUTPUTS)[None, :]
        tl.store(target, totals.to(out.dtype.element_ty), mask=is_output)
