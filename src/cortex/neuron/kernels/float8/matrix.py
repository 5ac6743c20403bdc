"""An FP8 matrix in a GPU's memory."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cortex.neuron.kernels.expert_pairs import ExpertChoice, ExpertPairs, PairLists
from cortex.neuron.kernels.float8.codes import empty_float8_codes, widened
from cortex.neuron.kernels.float8.experts import float8_grouped_product
from cortex.neuron.kernels.float8.layout import Float8Layout
from cortex.neuron.kernels.float8.one_row import one_row_float8_product
from cortex.neuron.kernels.float8.product import MAX_SMALL_ROWS, float8_product, widened_product
from cortex.neuron.kernels.float8.rows import float8_rows
from cortex.neuron.kernels.float8.support import has_float8_products
from cortex.neuron.kernels.jit import has_kernels
from cortex.neuron.kernels.matrix import PLAIN, Epilogue, ExpertMatrix, KeptForm, Prologue
from cortex.neuron.kernels.products.grouped import combine, tiling


class Float8Matrix(ExpertMatrix):
    keeps: ClassVar[KeptForm] = "float8"

    def __init__(self, layout: Float8Layout, outputs: int, inputs: int, device: torch.device) -> None:
        super().__init__(outputs, inputs, device)
        self.codes = empty_float8_codes(layout, outputs, inputs, device)
        self._has_blocks = layout.block > 0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.codes.tensors

    def put_float8(self, first_row: int, codes: Tensor, scales: Tensor) -> None:
        self.codes.put_float8(first_row, codes, scales)

    def put_values(self, first_row: int, values: Tensor) -> None:
        self.codes.put_values(first_row, values)

    def values(self, rows: slice = slice(None)) -> Tensor:
        return widened(self.codes, rows)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return widened(self.codes, ids).to(dtype)

    def fuses(self, prologue: Prologue, x: Tensor) -> bool:
        """Rows are rounded to eight bits together with the prologue."""
        return self._rounds_rows(x) or (prologue.activation is None and len(x) == 1 and has_kernels(x))

    def gates(self, x: Tensor) -> bool:
        if not self._rounds_rows(x):
            return len(x) == 1 and has_kernels(x)
        return not self._has_blocks and len(x) <= MAX_SMALL_ROWS

    def rounds(self, dtype: torch.dtype) -> bool:  # noqa: ARG002
        return False

    def _rounds_rows(self, x: Tensor) -> bool:
        return len(x) > 1 and has_float8_products(x.device)

    def _product(self, x: Tensor, prologue: Prologue, epilogue: Epilogue, out: Tensor | None) -> Tensor:
        if self._rounds_rows(x):
            return float8_product(float8_rows(x, prologue, grouped=self._has_blocks), self.codes, epilogue, out)
        if len(x) > 1 or not has_kernels(x):
            return widened_product(x.contiguous(), self.codes, epilogue, out)
        if out is None:
            outputs = self.outputs if epilogue.activation is None else self.outputs // 2
            out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
        one_row_float8_product(x.contiguous(), self.codes, out, prologue, epilogue)
        return out

    def expand_rows(
        self,
        x: Tensor,
        choice: ExpertChoice,
        norm: Prologue,
        activation: str | None,
        out: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        weights = torch.ones_like(choice.weights) if activation is None else None
        pairs = ExpertPairs(choice.experts, weights, choice.experts.shape[1])
        one_row_float8_product(x, self.codes, out, norm, Epilogue(bias, activation=activation), pairs)

    def contract_rows(
        self, inner: Tensor, choice: ExpertChoice, residual: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        out = torch.empty(len(inner), residual.shape[1], dtype=inner.dtype, device=inner.device)
        pairs = ExpertPairs(choice.experts, choice.weights, 1)
        one_row_float8_product(inner, self.codes, out, PLAIN, Epilogue(bias), pairs)
        return combine(out, residual)

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
        scales = None
        if has_float8_products(x.device):
            rows = float8_rows(x, grouped=False)
            x, scales = rows.codes, rows.scales
        tile = tiling(load)
        float8_grouped_product(
            x, scales, self.codes, lists, out, tile, pairs_per_row=pairs_per_row, activation=activation, bias=bias
        )
