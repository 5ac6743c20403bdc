"""relu(x)², the activation of feed-forward blocks without a gate."""

from __future__ import annotations

from torch import Tensor

from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, has_kernels, jit, launch_options, tl, triton


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
        gdc_launch_dependents()
        gdc_wait()
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place, mask=place < count, other=0.0).to(tl.float32)
    value = tl.where(value > 0.0, value * value, tl.where(value == value, 0.0, value))
    tl.store(x + place, value.to(x.dtype.element_ty), mask=place < count)
