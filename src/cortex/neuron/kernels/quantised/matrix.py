"""A matrix of integer codes in a GPU's memory, with scales of groups of columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from cortex.neuron.kernels.expert_pairs import ExpertChoice, ExpertPairs, PairLists
from cortex.neuron.kernels.jit import (
    gdc_launch_dependents,
    gdc_wait,
    has_kernels,
    jit,
    launch_options,
    num_processors,
    tl,
    triton,
)
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
        from cortex.neuron.kernels.quantised.hopper import streams

        return streams.pairs_product if streams.takes(x, self.codes) else one_row_product

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
        from cortex.neuron.kernels.quantised.hopper import streams

        is_streamed = streams.takes(x, self.codes)
        product = streams.lists_product if is_streamed else packed_grouped_product
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
        from cortex.neuron.kernels.quantised.hopper import tiles

        if not tiles.takes(x, self.codes.layout, len(parts), len(lists.counts)):
            return False
        tiles.gated_pairs(x, self.codes, down.codes, lists, parts, slots=slots, activation=activation, biases=biases)
        return True


_MAX_WHOLE_ROW = 1 << 14
"""Columns of the longest rows that a program puts into order: they fit into its registers and shared memory."""
_PART_COLUMNS = 1024
"""Columns of a program for longer rows."""


class OrderedMatrix(PackedMatrix):
    """The columns are sorted by the groups that share a scale, as GPTQ with `desc_act` needs.

    One launch puts inputs into the same order before a product, and computes the norm, if there is one. Holds no
    experts. `values` and `rows` have the columns in the order of the inputs.
    """

    keeps: ClassVar[KeptForm] = "ordered"

    def __init__(self, layout: Layout, outputs: int, inputs: int, device: torch.device) -> None:
        super().__init__(layout, outputs, inputs, device)
        self.order = torch.empty(inputs, dtype=torch.int16, device=device)
        """Which input each column takes, in 16 bits without a sign."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*super().tensors, self.order)

    def put_order(self, columns: Tensor) -> None:
        """Before any rows. columns: [inputs], a permutation"""
        self.order.copy_(columns.to(self.order.dtype))

    def put_values(self, first_row: int, values: Tensor) -> None:
        super().put_values(first_row, values.index_select(1, self._columns()))

    def values(self, rows: slice = slice(None)) -> Tensor:
        return self._unsorted(super().values(rows))

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return self._unsorted(super().rows(ids, dtype))

    def fuses(self, prologue: Prologue, x: Tensor) -> bool:
        return prologue.activation is None and has_kernels(x)

    def _product(self, x: Tensor, prologue: Prologue, epilogue: Epilogue, out: Tensor | None) -> Tensor:
        return super()._product(in_order(x, self.order, prologue), PLAIN, epilogue, out)

    def _columns(self) -> Tensor:
        return self.order.long() & 0xFFFF

    def _unsorted(self, values: Tensor) -> Tensor:
        return torch.empty_like(values).index_copy_(1, self._columns(), values)


def in_order(x: Tensor, order: Tensor, prologue: Prologue = PLAIN) -> Tensor:
    """The columns of norm(x), or of x, that `order` names. x: [rows, inputs] → the same shape, contiguous"""
    if not has_kernels(x):
        return in_order_reference(x, order, prologue)
    rows, size = x.shape
    is_whole = size <= _MAX_WHOLE_ROW
    if not is_whole:
        x, prologue = prologue.applied(x), PLAIN
    block = triton.next_power_of_2(size) if is_whole else _PART_COLUMNS
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    _in_order_kernel[(rows, triton.cdiv(size, block))](
        x,
        order,
        prologue.norm,
        out,
        x.stride(0),
        size,
        prologue.eps,
        BLOCK=block,
        WHOLE=is_whole,
        NORM=prologue.norm is not None,
        num_warps=max(1, min(16, block // 512)),
        **launch_options(x.device),
    )
    return out


def in_order_reference(x: Tensor, order: Tensor, prologue: Prologue = PLAIN) -> Tensor:
    """See `in_order`."""
    return prologue.applied(x)[:, order.long() & 0xFFFF]


@jit
def _in_order_kernel(
    x,
    order,
    norm_weight,
    out,
    stride,
    size,
    eps,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row and BLOCK columns. WHOLE: a block is a whole row, which is read once and put into order in
    shared memory. Only then there may be a norm."""
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    place = tl.load(order + column, mask=inside, other=0).to(tl.int32) & 0xFFFF
    if NORM:
        gain = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    if WHOLE:
        values = tl.load(x + row * stride + column, mask=inside, other=0.0)
        if NORM:
            exact = values.to(tl.float32)
            exact = exact * tl.rsqrt(tl.sum(exact * exact, 0) / size + eps) * gain
            values = exact.to(out.dtype.element_ty)
        values = tl.gather(values, place, 0)
    else:
        values = tl.load(x + row * stride + place, mask=inside, other=0.0)
    tl.store(out + row * size + column, values, mask=inside)
