"""How GEMVs are launched and end: for matrices of codes and of FP8, whose kernels take each pair of a row and an expert
as a row of its own, too. The dense kernel ends in the same way."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from cortex.neuron.kernels.activations import activated, activation_number
from cortex.neuron.kernels.expert_pairs import ExpertPairs
from cortex.neuron.kernels.jit import jit, launch_options, num_processors, tl, triton
from cortex.neuron.kernels.matrix import Epilogue


class OneRowTiles(NamedTuple):
    """How a GEMV is cut into programs."""

    outputs: int
    width: int
    """Units of columns at a time: words of four (FP8), or chunks of 128 (codes)."""
    warps: int
    programs: int
    """Programs on each processor, which share the blocks of rows; 0: one for each block."""
    registers: int | None
    """The most registers of a thread, so that the programs fit."""


def launch_one_row(
    kernel: Any,
    x: Tensor,
    planes: tuple[Tensor | None, ...],
    norm: Tensor | None,
    eps: float,
    epilogue: Epilogue,
    out: Tensor,
    tiles: OneRowTiles,
    pairs: ExpertPairs | None,
    **constants: Any,
) -> None:
    """`planes`: what holds the matrix. `pairs`: one for each row of `out`; None: there is one row."""
    num_pairs, outputs = out.shape
    activation = activation_number(epilogue.activation)
    rows = tiles.outputs // 2 if activation else tiles.outputs
    num_blocks = programs = triton.cdiv(outputs, rows)
    if tiles.programs:
        programs = min(num_blocks, max(1, tiles.programs * num_processors(x.device) // num_pairs))
    kernel[(programs, num_pairs)](
        x,
        *planes,
        epilogue.bias,
        norm,
        epilogue.residual,
        out,
        pairs.chosen if pairs else None,
        pairs.weights if pairs else None,
        outputs,
        num_blocks,
        eps,
        BIAS=epilogue.bias is not None,
        NORM=norm is not None,
        RESIDUAL=epilogue.residual is not None,
        ACTIVATION=activation,
        WHOLE=outputs % rows == 0,
        PAIRS_PER_ROW=pairs.per_row if pairs else 0,
        WEIGHTED=pairs is not None and pairs.weights is not None,
        BLOCK_OUT=tiles.outputs,
        num_warps=tiles.warps,
        maxnreg=tiles.registers,
        **constants,
        **launch_options(x.device),
    )


@jit
def added_to_row(
    bias,
    residual,
    block,
    outputs,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """What is added to the products of a block. Loaded early, its latency is hidden. With an ACTIVATION half of the
    block are the gate's rows, and there is no residual."""
    row = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    source = row
    if ACTIVATION:
        rows: tl.constexpr = BLOCK_OUT // 2
        line = tl.arange(0, BLOCK_OUT)
        row = block * rows + line % rows
        source = row + line // rows * outputs
    added = tl.zeros((BLOCK_OUT,), tl.float32)
    if BIAS:
        added += tl.load(bias + source, mask=row < outputs, other=0.0).to(tl.float32)
    if RESIDUAL:
        added += tl.load(residual + row, mask=row < outputs, other=0.0).to(tl.float32)
    return added


@jit
def store_row(y, added, out, block, outputs, IS_ADDED: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_OUT: tl.constexpr):
    """What comes after the product of a block of rows. y: [BLOCK_OUT], with an activation half of them the gate's"""
    rows: tl.constexpr = BLOCK_OUT // 2 if ACTIVATION else BLOCK_OUT
    if IS_ADDED:
        y += added
    if ACTIVATION:
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, rows)), (1, 0)))
        y = activated(gate, up, ACTIVATION)
    row = block * rows + tl.arange(0, rows)
    tl.store(out + row, y.to(out.dtype.element_ty), mask=row < outputs)
