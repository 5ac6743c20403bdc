"""GEMV and small-batch GEMM, as in decode steps. They are bound by the bytes of the matrix, so the norm before and the
gate or addition after are fused into the same pass. With several rows the norm is a separate launch: fused, each
program would repeat it for all rows.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.activations import activate_reference
from cortex.neuron.kernels.dense.one_row import one_row_product
from cortex.neuron.kernels.dense.small_batch import small_batch_product
from cortex.neuron.kernels.matrix import Epilogue, Prologue
from cortex.neuron.kernels.norm import rms_norm, rms_norm_reference


def small_product(
    x: Tensor, weight: Tensor, counters: Tensor, prologue: Prologue, epilogue: Epilogue, out: Tensor
) -> None:
    """See `Matrix.product`. The prologue has no activation. x: [rows, in], weight: [out, in]; counters: see
    `small_batch_product`"""
    if len(x) == 1:
        one_row_product(x, weight, prologue, epilogue, out)
        return
    if prologue.norm is not None:
        x = rms_norm(x, prologue.norm, prologue.eps)
    small_batch_product(x, weight, counters, epilogue, out)


def small_product_reference(x: Tensor, weight: Tensor, prologue: Prologue, epilogue: Epilogue) -> Tensor:
    if prologue.norm is not None:
        x = rms_norm_reference(x, prologue.norm, prologue.eps)
    y = F.linear(x, weight, epilogue.bias)
    if epilogue.activation is not None:
        y = activate_reference(y, epilogue.activation)
    return y if epilogue.residual is None else y + epilogue.residual
