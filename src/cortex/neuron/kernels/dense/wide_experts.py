"""Grouped GEMM of dense experts with tiles of 192 pairs: the matrix is read from the L2 cache less often than with
tiles of 128, and less of a tile is empty.

A tile is two products with the same rows of the matrix, of 128 pairs and of 64. The second is left out where no pairs
are left for it.
"""

from __future__ import annotations

from torch import Tensor

from cortex.neuron.kernels.expert_pairs import PairLists
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, tl
from cortex.neuron.kernels.products.grouped import launch_grouped, own_tile, pairs_from, store_pairs
from cortex.neuron.kernels.shared_memory import SharedMemory

_MAIN, _TAIL = 128, 64
_BLOCK_OUT, _BLOCK_IN = 128, 64
_STAGES = 3


def takes_wide_tiles(load: int, inputs: int, outputs: int, element_bytes: int, shared: SharedMemory) -> bool:
    """Whether an expert has more pairs than a tile of another kernel, and the matrix consists of whole blocks. Where
    products are synchronous, the sums of a tile would not fit into registers."""
    column_bytes = (2 * _BLOCK_OUT + _MAIN + _TAIL) * element_bytes
    fits = shared.copies == 2 and shared.holds(_STAGES * _BLOCK_IN * column_bytes)
    return fits and load > _MAIN and inputs % _BLOCK_IN == 0 and outputs % _BLOCK_OUT == 0


def wide_grouped_product(
    x: Tensor,
    weight: Tensor,
    lists: PairLists,
    out: Tensor,
    *,
    pairs_per_row: int,
    activation: str | None,
    bias: Tensor | None,
) -> None:
    """See `dense_grouped_product`."""
    launch_grouped(
        _wide_kernel,
        (x, weight, bias),
        lists,
        out,
        tile_pairs=_MAIN + _TAIL,
        block_out=_BLOCK_OUT,
        pairs_per_row=pairs_per_row,
        activation=activation,
        BIAS=bias is not None,
        INPUTS=x.shape[1],
        BLOCK_IN=_BLOCK_IN,
        MAIN=_MAIN,
        TAIL=_TAIL,
        num_warps=8,
        num_stages=_STAGES,
    )


@jit(do_not_specialize=["members_stride"])
def _wide_kernel(
    x,
    weight,
    bias,
    pair_weights,
    counts,
    members,
    out,
    members_stride,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per tile of one expert's pairs and BLOCK_OUT rows of its matrix, as in `experts.py`."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()  # only now: the next kernel may read the lists of pairs at once
    expert, first, count = own_tile(counts, EXPERTS, EXPERTS_BLOCK, BLOCK_PAIRS)
    if expert >= EXPERTS:
        return
    pair, valid = pairs_from(members, members_stride, expert, first, count, MAIN)
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    line = weight + expert * ((2 if ACTIVATION else 1) * OUTPUTS * INPUTS) + output[:, None] * INPUTS
    source = x + (pair // PAIRS_PER_ROW).to(tl.int64)[None, :] * INPUTS
    total = tl.zeros((BLOCK_OUT, MAIN), tl.float32)
    total_up = tl.zeros((BLOCK_OUT, MAIN), tl.float32)
    if count - first > MAIN:
        more, more_valid = pairs_from(members, members_stride, expert, first + MAIN, count, TAIL)
        more_source = x + (more // PAIRS_PER_ROW).to(tl.int64)[None, :] * INPUTS
        tail = tl.zeros((BLOCK_OUT, TAIL), tl.float32)
        tail_up = tl.zeros((BLOCK_OUT, TAIL), tl.float32)
        for start in range(0, INPUTS, BLOCK_IN):
            column = start + tl.arange(0, BLOCK_IN)
            tile = tl.load(line + column[None, :])
            value = tl.load(source + column[:, None], mask=valid[None, :], other=0.0)  # [in, pairs]
            more_value = tl.load(more_source + column[:, None], mask=more_valid[None, :], other=0.0)
            total = tl.dot(tile, value, total)
            tail = tl.dot(tile, more_value, tail)
            if ACTIVATION:
                tile_up = tl.load(line + OUTPUTS * INPUTS + column[None, :])
                total_up = tl.dot(tile_up, value, total_up)
                tail_up = tl.dot(tile_up, more_value, tail_up)
        store_pairs(
            tail, tail_up, bias, expert, out, pair_weights, more, more_valid, output, OUTPUTS, ACTIVATION, BIAS
        )  # fmt: skip
    else:
        for start in range(0, INPUTS, BLOCK_IN):
            column = start + tl.arange(0, BLOCK_IN)
            tile = tl.load(line + column[None, :])
            value = tl.load(source + column[:, None], mask=valid[None, :], other=0.0)
            total = tl.dot(tile, value, total)
            if ACTIVATION:
                tile_up = tl.load(line + OUTPUTS * INPUTS + column[None, :])
                total_up = tl.dot(tile_up, value, total_up)
    store_pairs(
        total, total_up, bias, expert, out, pair_weights, pair, valid, output, OUTPUTS, ACTIVATION, BIAS
    )  # fmt: skip
