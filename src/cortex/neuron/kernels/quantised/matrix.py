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
from cortex.neuron.kernels.products.grouped import combine, expert_load
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

        # Without an activation the stream reads the lists at once: after the kernel that expands, not before it.
        is_streamed = (activation is not None or pairs_per_row == 1) and streams.takes(x, self.codes)
        x, pairs_per_row = self._rows_of_pairs(x, lists, pairs_per_row)
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
        x, slots = self._rows_of_pairs(x, lists, slots)
        tiles.gated_pairs(x, self.codes, down.codes, lists, parts, slots=slots, activation=activation, biases=biases)
        return True

    def _rows_of_pairs(self, x: Tensor, lists: PairLists, pairs_per_row: int) -> tuple[Tensor, int]:  # noqa: ARG002
        """The inputs of pairs as their experts take them, and how many adjacent pairs share a row."""
        return x, pairs_per_row


_MAX_WHOLE_ROW = 1 << 14
"""Columns of the longest rows that a program puts into order: they fit into its registers and shared memory."""
_PART_COLUMNS = 1024
"""Columns of a program for longer rows."""


class OrderedMatrix(PackedMatrix):
    """The columns are sorted by the groups that share a scale, as GPTQ with `desc_act` needs.

    One launch puts inputs into the same order before a product, and computes the norm, if there is one. Each expert has
    an order of its own; before a product of experts, each pair gets a row in its expert's order. No experts' rows of
    down are in such a matrix. `values` and `rows` have the columns in the order of the inputs.
    """

    keeps: ClassVar[KeptForm] = "ordered"

    def __init__(self, layout: Layout, outputs: int, inputs: int, device: torch.device, num_experts: int = 1) -> None:
        super().__init__(layout, outputs, inputs, device)
        self.order = torch.arange(inputs, device=device).to(torch.int16).repeat(num_experts, 1)
        """Which input each column takes, by expert: [experts, inputs], in 16 bits without a sign."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*super().tensors, self.order)

    def put_order(self, first_row: int, columns: Tensor) -> None:
        """That of the expert with this row, before any of its rows; without it, columns are in the order of the inputs.
        columns: [inputs], a permutation"""
        self.order[first_row // self._expert_rows].copy_(columns.to(self.order.dtype))

    def put_values(self, first_row: int, values: Tensor) -> None:
        rows = torch.arange(first_row, first_row + len(values), device=self.device)
        super().put_values(first_row, values.gather(1, self._columns(rows)))

    def values(self, rows: slice = slice(None)) -> Tensor:
        ids = torch.arange(self.outputs, device=self.device)[rows]
        return self._unsorted(super().values(rows), ids)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return self._unsorted(super().rows(ids, dtype), ids)

    def fuses(self, prologue: Prologue, x: Tensor) -> bool:
        return prologue.activation is None and has_kernels(x)

    def _product(self, x: Tensor, prologue: Prologue, epilogue: Epilogue, out: Tensor | None) -> Tensor:
        return super()._product(in_order(x, self.order, prologue), PLAIN, epilogue, out)

    def expand_rows(
        self,
        x: Tensor,
        choice: ExpertChoice,
        norm: Prologue,
        activation: str | None,
        out: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        alone = ExpertChoice(choice.experts.view(-1, 1), choice.weights.view(-1, 1))
        super().expand_rows(in_order(x, self.order, norm, choice.experts), alone, PLAIN, activation, out, bias)

    def _rows_of_pairs(self, x: Tensor, lists: PairLists, pairs_per_row: int) -> tuple[Tensor, int]:
        return lists_in_order(x, self.order, lists, pairs_per_row), 1

    @property
    def _expert_rows(self) -> int:
        return self.outputs // len(self.order)

    def _columns(self, ids: Tensor) -> Tensor:
        """Which input each column of these rows takes: [rows, inputs]"""
        return (self.order.long() & 0xFFFF)[ids // self._expert_rows]

    def _unsorted(self, values: Tensor, ids: Tensor) -> Tensor:
        return torch.empty_like(values).scatter_(1, self._columns(ids), values)


def in_order(x: Tensor, order: Tensor, prologue: Prologue = PLAIN, chosen: Tensor | None = None) -> Tensor:
    """The columns of norm(x), or of x, that `order` names. x: [rows, inputs] → the same shape, contiguous

    With `chosen`, experts by row, [rows, slots]: those that the order of each pair's expert names. → [pairs, inputs]
    """
    if not has_kernels(x):
        return in_order_reference(x, order, prologue, chosen)
    is_whole, block = _blocks(x)
    if not is_whole:
        x, prologue = prologue.applied(x), PLAIN
    size, slots = x.shape[1], 0 if chosen is None else chosen.shape[1]
    out = torch.empty(len(x) * max(1, slots), size, dtype=x.dtype, device=x.device)
    _in_order_kernel[(len(out), triton.cdiv(size, block))](
        x,
        order,
        chosen,
        prologue.norm,
        out,
        x.stride(0),
        size,
        prologue.eps,
        BLOCK=block,
        WHOLE=is_whole,
        NORM=prologue.norm is not None,
        SLOTS=slots,
        num_warps=_warps(block),
        **launch_options(x.device),
    )
    return out


def in_order_reference(x: Tensor, order: Tensor, prologue: Prologue = PLAIN, chosen: Tensor | None = None) -> Tensor:
    """See `in_order`."""
    columns = order.long() & 0xFFFF
    if chosen is None:
        return prologue.applied(x)[:, columns.view(-1)]
    return prologue.applied(x).repeat_interleave(chosen.shape[1], 0).gather(1, columns[chosen.flatten().long()])


def lists_in_order(x: Tensor, order: Tensor, lists: PairLists, pairs_per_row: int) -> Tensor:
    """The columns of the row of each pair that the order of its expert names; rows of pairs that are in no list are
    undefined. x: [pairs / pairs_per_row, inputs] → [pairs, inputs]"""
    (rows, size), (is_whole, block), num_experts = x.shape, _blocks(x), len(lists.counts)
    out = torch.empty(rows * pairs_per_row, size, dtype=x.dtype, device=x.device)
    programs = min(rows, expert_load(len(out), num_experts))
    _lists_in_order_kernel[(num_experts, programs, triton.cdiv(size, block))](
        x,
        order,
        lists.counts,
        lists.members,
        out,
        lists.members.stride(0),
        x.stride(0),
        size,
        BLOCK=block,
        WHOLE=is_whole,
        PAIRS_PER_ROW=pairs_per_row,
        num_warps=_warps(block),
        **launch_options(x.device),
    )
    return out


def _blocks(x: Tensor) -> tuple[bool, int]:
    """Whether a program takes whole rows, and its columns."""
    is_whole = x.shape[1] <= _MAX_WHOLE_ROW
    return is_whole, triton.next_power_of_2(x.shape[1]) if is_whole else _PART_COLUMNS


def _warps(block: int) -> int:
    return max(1, min(16, block // 512))


@jit
def _in_order_kernel(
    x,
    order,
    chosen,
    norm_weight,
    out,
    stride,
    size,
    eps,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    NORM: tl.constexpr,
    SLOTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row and BLOCK columns. WHOLE: a block is a whole row, which is read once and put into order in
    shared memory. Only then there may be a norm. SLOTS: pairs per row of x, each with an expert; 0: there is one
    order."""
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    source = x + row * stride
    if SLOTS == 0:
        place = tl.load(order + column, mask=inside, other=0).to(tl.int32) & 0xFFFF
    if NORM:
        gain = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    if SLOTS > 0:
        source = x + row // SLOTS * stride
        own_order = order + tl.load(chosen + row).to(tl.int64) * size
        place = tl.load(own_order + column, mask=inside, other=0).to(tl.int32) & 0xFFFF
    if WHOLE:
        values = tl.load(source + column, mask=inside, other=0.0)
        if NORM:
            exact = values.to(tl.float32)
            exact = exact * tl.rsqrt(tl.sum(exact * exact, 0) / size + eps) * gain
            values = exact.to(out.dtype.element_ty)
        values = tl.gather(values, place, 0)
    else:
        values = tl.load(source + place, mask=inside, other=0.0)
    tl.store(out + row * size + column, values, mask=inside)


@jit(do_not_specialize=["members_stride"])
def _lists_in_order_kernel(
    x,
    order,
    counts,
    members,
    out,
    members_stride,
    stride,
    size,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Programs of an expert and BLOCK columns take turns with its pairs. WHOLE: see `_in_order_kernel`."""
    if OVERLAP:
        gdc_launch_dependents()
    expert = tl.program_id(0).to(tl.int64)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    place = tl.load(order + expert * size + column, mask=inside, other=0).to(tl.int32) & 0xFFFF
    if OVERLAP:
        gdc_wait()
    for turn in range(tl.program_id(1), tl.load(counts + expert), tl.num_programs(1)):
        pair = tl.load(members + expert * members_stride + turn).to(tl.int64)
        source = x + pair // PAIRS_PER_ROW * stride
        if WHOLE:
            values = tl.gather(tl.load(source + column, mask=inside, other=0.0), place, 0)
        else:
            values = tl.load(source + place, mask=inside, other=0.0)
        tl.store(out + pair * size + column, values, mask=inside)
