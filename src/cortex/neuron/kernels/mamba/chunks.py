"""Prefill rows of Mamba-2, in chunks, with the mathematics of `scan.mamba_chunked`.

A program takes some columns of one head of one row and carries their memory from chunk to chunk. Reference:
`scan.mamba_reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton
from cortex.neuron.kernels.mamba.rules import CHUNK, MambaRules, MambaState
from cortex.neuron.kernels.mamba.step import time_step
from cortex.neuron.kernels.recurrent.causal_conv import conv_chunks
from cortex.neuron.kernels.recurrent.rows import chunk_bounds
from cortex.neuron.kernels.shared_memory import SharedMemory, shared_memory

COLUMNS = 32
"""Columns of the memory of a head that one program carries."""
WARPS = 4


def mamba_chunks(projected: Tensor, rules: MambaRules, batch: Batch, state: MambaState, out: Tensor) -> None:
    """projected: [prefill tokens, projected size], out: [prefill tokens, inner] float32, contiguous. Advances the state
    of the rows."""
    assert batch.prefill_cuts is not None
    device, first = projected.device, batch.num_decodes
    x = projected[:, rules.inner : rules.inner + rules.channels]
    mixed = torch.empty(x.shape, dtype=x.dtype, device=device)
    conv_chunks(x, rules.conv_weight, state.recent, batch, mixed, rules.conv_bias)
    columns = max(16, min(COLUMNS, triton.next_power_of_2(rules.head_dim)))
    state_block = max(16, triton.next_power_of_2(rules.state_dim))
    _carry_kernel[(batch.num_prefills, rules.heads, triton.cdiv(rules.head_dim, columns))](
        projected,
        mixed,
        rules.decay_rate,
        rules.step_bias,
        rules.skip,
        batch.rows[first:],
        batch.lengths[first:],
        batch.prefill_offsets,
        batch.prefill_cuts,
        state.memory,
        out,
        projected.stride(0),
        state.memory.stride(0),
        HEADS=rules.heads,
        SHARED=rules.heads // rules.groups,
        DIM=rules.head_dim,
        STATE=rules.state_dim,
        STATE_BLOCK=state_block,
        COLUMNS=columns,
        CHUNK=CHUNK,
        num_warps=WARPS,
        num_stages=chunk_stages(state_block, columns, projected.element_size(), shared_memory(device)),
        **launch_options(device),
    )


def chunk_stages(state_block: int, columns: int, element_bytes: int, shared: SharedMemory) -> int:
    """Pipeline stages of the kernel: two where the current and the next chunk fit in shared memory."""
    in_chunk = CHUNK * (2 * state_block + columns)
    operands = CHUNK * (2 * state_block + CHUNK) + state_block * columns
    return 2 if shared.holds((shared.copies * in_chunk + operands) * element_bytes) else 1


@jit(do_not_specialize_on_alignment=["rows", "lengths", "cuts"])
def _carry_kernel(
    projected,
    mixed,
    decay_rate,
    step_bias,
    skip,
    rows,
    lengths,
    offsets,
    cuts,
    memory,
    out,
    projected_stride,
    memory_stride,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    DIM: tl.constexpr,
    STATE: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row, head and COLUMNS of its memory."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    kind: tl.constexpr = mixed.dtype.element_ty
    INNER: tl.constexpr = HEADS * DIM
    KEYS: tl.constexpr = HEADS // SHARED * STATE
    CHANNELS: tl.constexpr = INNER + 2 * KEYS
    prefill = tl.program_id(0)
    head = tl.program_id(1)
    offset = tl.load(offsets + prefill).to(tl.int64)
    count = tl.load(offsets + prefill + 1) - offset
    if count == 0:
        return
    is_new = tl.load(lengths + prefill) == count
    state = tl.arange(0, STATE_BLOCK)
    state_inside = state < STATE
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    column_inside = column < DIM
    row, slot = tl.load(rows + prefill), tl.load(cuts + prefill * 2 + 1).to(tl.int64)
    cut = tl.load(cuts + prefill * 2).to(tl.int64)
    where = memory + head * STATE * DIM + state[:, None] * DIM + column[None, :]
    inside = state_inside[:, None] & column_inside[None, :]
    known = tl.load(where + row * memory_stride, mask=inside, other=0.0)  # [state, columns]
    known = tl.where(is_new, 0.0, known)
    rate, bias, share = tl.load(decay_rate + head), tl.load(step_bias + head), tl.load(skip + head)
    place = tl.arange(0, CHUNK)
    later, earlier = place[:, None], place[None, :]
    for index in range(tl.cdiv(cut, CHUNK) + tl.cdiv(count - cut, CHUNK)):
        first, end = chunk_bounds(index, cut, count, CHUNK)
        token = offset + first + place
        token_inside = first + place < end
        given = tl.load(projected + token * projected_stride + INNER + CHANNELS + head, mask=token_inside, other=0.0)
        size = tl.where(token_inside, time_step(given, bias), 0.0)
        log_decay = -rate * size
        total = tl.cumsum(log_decay, 0)
        last = tl.sum(log_decay, 0)
        between = tl.exp(tl.where(later >= earlier, total[:, None] - total[None, :], -float("inf")))

        line = mixed + token[:, None] * CHANNELS
        by_state = line + INNER + head // SHARED * STATE + state[None, :]
        state_mask = token_inside[:, None] & state_inside[None, :]
        k = tl.load(by_state, mask=state_mask, other=0.0)
        q = tl.load(by_state + KEYS, mask=state_mask, other=0.0)
        column_mask = token_inside[:, None] & column_inside[None, :]
        v = tl.load(line + head * DIM + column[None, :], mask=column_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * between * size[None, :]
        read = tl.dot(scores.to(kind), v, input_precision="tf32x3")
        decayed = (q.to(tl.float32) * tl.exp(total)[:, None]).to(kind)
        read += tl.dot(decayed, known.to(kind), input_precision="tf32x3")
        gates = projected + token[:, None] * projected_stride + head * DIM + column[None, :]
        gate = tl.load(gates, mask=column_mask, other=0.0).to(tl.float32)
        read = (read + share * v.to(tl.float32)) * gate * tl.sigmoid(gate)
        tl.store(out + token[:, None] * INNER + head * DIM + column[None, :], read, mask=column_mask)
        written = (k.to(tl.float32) * (tl.exp(last - total) * size)[:, None]).to(kind)
        known = known * tl.exp(last) + tl.dot(tl.trans(written), v, input_precision="tf32x3")
        if end == cut:
            tl.store(where + slot * memory_stride, known, mask=inside)
    tl.store(where + row * memory_stride, known, mask=inside)
