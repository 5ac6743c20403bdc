"""A matrix in the dtype that the model computes in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.activations import activate_reference
from cortex.neuron.kernels.dense.blocks import beats_library
from cortex.neuron.kernels.dense.expert_rows import contract_rows, expand_rows
from cortex.neuron.kernels.dense.experts import dense_grouped_product
from cortex.neuron.kernels.dense.one_row import one_row_product
from cortex.neuron.kernels.dense.small_batch import small_batch_product
from cortex.neuron.kernels.dense.wide_experts import takes_wide_tiles, wide_grouped_product
from cortex.neuron.kernels.expert_pairs import ExpertChoice, PairLists
from cortex.neuron.kernels.jit import has_kernels, num_processors
from cortex.neuron.kernels.matrix import Epilogue, ExpertMatrix, Prologue
from cortex.neuron.kernels.norm import rms_norm, rms_norm_reference
from cortex.neuron.kernels.products.grouped import tiling
from cortex.neuron.kernels.products.small_batch import COUNTED_ROWS
from cortex.neuron.kernels.shared_memory import shared_memory
from cortex.neuron.private_api.torch import onednn_takes_bfloat16


class DenseMatrix(ExpertMatrix):
    max_reads = 1.15

    def __init__(self, weight: Tensor) -> None:
        """weight: [outputs, inputs]"""
        super().__init__(weight.shape[0], weight.shape[1], weight.device)
        self.weight = weight
        self._counters = torch.zeros(-(-self.outputs // COUNTED_ROWS), dtype=torch.int32, device=self.device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    def put_values(self, first_row: int, values: Tensor) -> None:
        self.weight[first_row : first_row + len(values)] = values

    def values(self, rows: slice = slice(None)) -> Tensor:
        return self.weight[rows]

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(ids, self.weight).to(dtype)

    def fuses(self, prologue: Prologue, x: Tensor) -> bool:
        return prologue.activation is None and self._beats_library(x, gated=False)

    def gates(self, x: Tensor) -> bool:
        return self._beats_library(x, gated=True)

    def _beats_library(self, x: Tensor, *, gated: bool) -> bool:
        if not has_kernels(x):
            return False
        outputs = self.outputs // 2 if gated else self.outputs
        is_asynchronous = shared_memory(x.device).copies == 2 and x.element_size() == 2
        processors = num_processors(x.device)
        return beats_library(len(x), self.inputs, outputs, processors, gated=gated, is_asynchronous=is_asynchronous)

    def rounds(self, dtype: torch.dtype) -> bool:
        return dtype != torch.float32

    def _product(self, x: Tensor, prologue: Prologue, epilogue: Epilogue, out: Tensor | None) -> Tensor:
        gated = epilogue.activation is not None
        if self._beats_library(x, gated=gated):
            if out is None:
                outputs = self.outputs // 2 if gated else self.outputs
                out = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
            small_product(x, self.weight, self._counters, prologue, epilogue, out)
            return out
        y = self._library_product(x, epilogue)
        return y if out is None else out.copy_(y)

    def _library_product(self, x: Tensor, epilogue: Epilogue) -> Tensor:
        bias, residual = epilogue.bias, epilogue.residual
        if not x.is_cpu:
            if residual is not None and bias is None:
                return residual.addmm_(x, self.weight.t())
            y = F.linear(x, self.weight, bias)
        else:
            y = dense_product(x, self.weight, bias)
        return y if residual is None else y.add_(residual)

    def expand_rows(
        self,
        x: Tensor,
        choice: ExpertChoice,
        norm: Prologue,
        activation: str | None,
        out: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        expand_rows(x, self.weight, choice, norm, activation, out, bias)

    def contract_rows(
        self, inner: Tensor, choice: ExpertChoice, residual: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        return contract_rows(inner, self.weight, choice, residual, bias)

    def grouped(
        self,
        x: Tensor,
        lists: PairLists,
        out: Tensor,
        *,
        pairs_per_row: int,
        activation: str | None,
        load: int,
        bias: Tensor | None = None,
    ) -> None:
        inputs, outputs, shared = x.shape[1], out.shape[1], shared_memory(x.device)
        if activation is not None and takes_wide_tiles(load, inputs, outputs, x.element_size(), shared):
            wide_grouped_product(
                x, self.weight, lists, out, pairs_per_row=pairs_per_row, activation=activation, bias=bias
            )
            return
        # without a gate a step has half the bytes, and two programs with narrower tiles on a processor are faster
        tile = tiling(load if activation is not None else min(load, 64))
        dense_grouped_product(
            x, self.weight, lists, out, tile, pairs_per_row=pairs_per_row, activation=activation, bias=bias
        )


def small_product(
    x: Tensor, weight: Tensor, counters: Tensor, prologue: Prologue, epilogue: Epilogue, out: Tensor
) -> None:
    """GEMV and small-batch GEMM, as in decode steps. They are bound by the bytes of the matrix, so the norm before and
    the gate or addition after are fused into the same pass. With several rows the norm is a separate launch: fused,
    each program would repeat it for all rows.

    See `Matrix.product`. The prologue has no activation. x: [rows, in], weight: [out, in]; counters: see
    `small_batch_product`
    """
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


def dense_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """On a CPU. x: [rows, in], weight: [out, in], bias: [out] → [rows, out]"""
    if len(x) == 1:
        y = torch.mv(weight, x[0])[None]  # F.linear with one row repacks the matrix on every call
        return y if bias is None else y.add_(bias)
    if x.dtype == torch.bfloat16 and not onednn_takes_bfloat16():
        with _without_onednn():  # else torch tries it, fails, and warns of that
            return F.linear(x, weight, bias)
    return F.linear(x, weight, bias)


@contextmanager
def _without_onednn() -> Iterator[None]:
    library: Any = torch.backends.mkldnn  # types of its properties are wrong
    before = library.enabled
    library.enabled = False
    try:
        yield
    finally:
        library.enabled = before
