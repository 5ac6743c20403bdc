"""A matrix of integer codes in a GPU's memory, with scales of groups of columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from cortex.neuron.kernels.expert_pairs import ExpertChoice, ExpertPairs, PairLists
from cortex.neuron.kernels.jit import has_kernels, num_processors
from cortex.neuron.kernels.matrix import PLAIN, Epilogue, ExpertMatrix, KeptForm, Prologue
from cortex.neuron.kernels.products.grouped import combine
from cortex.neuron.kernels.quantised.codes import empty_codes, unpacked
from cortex.neuron.kernels.quantised.contract_rows import MAX_CHUNKS, contract_rows_product
from cortex.neuron.kernels.quantised.experts import packed_grouped_product
from cortex.neuron.kernels.quantised.few_rows import few_rows_product, max_few_rows
from cortex.neuron.kernels.quantised.layout import CHUNK, Layout, padded
from cortex.neuron.kernels.quantised.one_row import has_long_rows, long_row_product, one_row_product
from cortex.neuron.kernels.quantised.product import (
    MAX_SMALL_ROWS,
    large_batch_product,
    packed_product_reference,
    packed_rows,
    small_batch_product,
)


class PackedMatrix(ExpertMatrix):
    keeps: ClassVar[KeptForm] = "codes"

    def __init__(self, layout: Layout, outputs: int, inputs: int, device: torch.device) -> None:
        super().__init__(outputs, inputs, device)
        self.max_reads = 1.3 if layout.bits <= 4 else 1.6  # a GEMM unpacks more
        self.codes = empty_codes(layout, outputs, inputs, device)
        self._max_few_rows = max_few_rows(layout, outputs)
        self._has_long_rows = has_long_rows(layout, padded(inputs) // CHUNK, outputs, num_processors(device))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.codes.tensors

    def put_codes(self, first_row: int, code: Tensor, scale: Tensor, minimum: Tensor) -> None:
        self.codes.put_codes(first_row, code, scale, minimum)

    def put_values(self, first_row: int, values: Tensor) -> None:
        self.codes.put_values(first_row, values)

    def values(self, rows: slice = slice(None)) -> Tensor:
        return unpacked(self.codes, rows)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return packed_rows(self.codes, ids, dtype)

    def fuses(self, prologue: Prologue, x: Tensor) -> bool:
        return prologue.activation is None and len(x) <= self._max_few_rows and has_kernels(x)

    def gates(self, x: Tensor) -> bool:
        return len(x) <= MAX_SMALL_ROWS and has_kernels(x)

    def rounds(self, dtype: torch.dtype) -> bool:  # noqa: ARG002
        return False

    def _product(self, x: Tensor, prologue: Prologue, epilogue: Epilogue, out: Tensor | None) -> Tensor:
        rows, residual, x = len(x), epilogue.residual, x.contiguous()
        if out is None and residual is not None and rows > MAX_SMALL_ROWS:
            out = residual  # the library adds to what it overwrites
        elif out is None:
            outputs = self.outputs if epilogue.activation is None else self.outputs // 2
            out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
        if not has_kernels(x):
            out.copy_(packed_product_reference(x, self.codes, epilogue))
        elif rows == 1 and self._has_long_rows and prologue.norm is None and epilogue.activation is None:
            long_row_product(x, self.codes, out, epilogue)
        elif rows == 1:
            one_row_product(x, self.codes, out, prologue, epilogue)
        elif rows <= self._max_few_rows:
            few_rows_product(x, self.codes, out, prologue, epilogue)
        elif rows <= MAX_SMALL_ROWS:
            small_batch_product(x, self.codes, out, epilogue)
        else:
            large_batch_product(x, self.codes, out, epilogue)
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
        product = self._pairs_product(x) if activation else one_row_product
        product(x, self.codes, out, norm, Epilogue(bias, activation=activation), pairs)

    def contract_rows(
        self, inner: Tensor, choice: ExpertChoice, residual: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        if choice.experts.shape[1] * padded(self.inputs) <= MAX_CHUNKS * CHUNK:
            return contract_rows_product(inner, self.codes, choice, residual, bias)
        out = torch.empty(len(inner), residual.shape[1], dtype=inner.dtype, device=inner.device)
        product = self._pairs_product(inner) if len(residual) > 1 else one_row_product
        product(inner, self.codes, out, PLAIN, Epilogue(bias), ExpertPairs(choice.experts, choice.weights, 1))
        return combine(out, residual)

    def _pairs_product(self, x: Tensor) -> Callable[..., None]:
        from cortex.neuron.kernels.quantised import streamed_experts

        return streamed_experts.pairs_product if streamed_experts.takes(x, self.codes) else one_row_product

    def grouped(
        self,
        x: Tensor,
        lists: PairLists,
        out: Tensor,
        *,
        pairs_per_row: int,
        activation: str | None,
        load: int,  # noqa: ARG002
        bias: Tensor | None = None,
    ) -> None:
        from cortex.neuron.kernels.quantised import streamed_experts

        is_streamed = streamed_experts.takes(x, self.codes)
        product = streamed_experts.lists_product if is_streamed else packed_grouped_product
        product(x, self.codes, lists, out, pairs_per_row=pairs_per_row, activation=activation, bias=bias)

    def gated_pairs(
        self,
        down: ExpertMatrix,
        x: Tensor,
        lists: PairLists,
        parts: Tensor,
        *,
        slots: int,
        activation: str,
        biases: tuple[Tensor | None, Tensor | None],
    ) -> bool:
        if not (isinstance(down, PackedMatrix) and down.codes.layout == self.codes.layout):
            return False
        from cortex.neuron.kernels.quantised import hopper_experts

        if not hopper_experts.takes(x, self.codes.layout, len(parts), len(lists.counts)):
            return False
        hopper_experts.gated_pairs(
            x, self.codes, down.codes, lists, parts, slots=slots, activation=activation, biases=biases
        )
        return True
