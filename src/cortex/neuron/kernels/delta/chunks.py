"""Prefill rows of a gated delta net, in chunks, with the mathematics of `gated_delta.delta_chunked`.

The first kernel prepares all chunks at once: it inverts the triangular system of each chunk and computes everything
that does not depend on the memory. The second kernel carries the memory of each head from chunk to chunk, a few columns
per program. Reference: `gated_delta.gated_delta_reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.batch import PREFILL_TILE, Batch
from cortex.neuron.kernels.delta.norm import gated_norm
from cortex.neuron.kernels.delta.rules import CHUNK, L2_EPS, DeltaRules, DeltaState
from cortex.neuron.kernels.delta.step import log_decay_of
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton
from cortex.neuron.kernels.recurrent.causal_conv import conv_chunks
from cortex.neuron.kernels.shared_memory import SharedMemory, shared_memory

VALUE_COLUMNS = 32
"""Columns of the memory of a head that one program carries."""
PREPARE_WARPS, CARRY_WARPS = 8, 4


def delta_chunks(projected: Tensor, rules: DeltaRules, batch: Batch, state: DeltaState, out: Tensor) -> None:
    """projected: [prefill tokens, projected size], out: [prefill tokens, value size], contiguous. Advances the state
    of the rows."""
    assert batch.prefill_tiles is not None
    device, kind, tokens = projected.device, projected.dtype, len(projected)
    heads, key_dim, value_dim = rules.value_heads, rules.key_dim, rules.value_dim
    mixed = conv_chunks(projected[:, : rules.channels], rules.conv_weight, state.recent, batch)

    def by_head(size: int) -> Tensor:
        return torch.empty((tokens, heads, size), dtype=kind, device=device)

    decayed_q, decayed_k, w = by_head(key_dim), by_head(key_dim), by_head(key_dim)
    u, attended = by_head(value_dim), by_head(CHUNK)
    # Stored at the first token of each chunk.
    chunk_decay = torch.empty((tokens, heads), dtype=torch.float32, device=device)
    sizes = {
        "HEADS": heads,
        "KEY_DIM": key_dim,
        "KEY_BLOCK": max(16, triton.next_power_of_2(key_dim)),
        "VALUE_DIM": value_dim,
        "CHUNK": CHUNK,
        **launch_options(device),
    }
    _prepare_kernel[(len(batch.prefill_tiles) * (PREFILL_TILE // CHUNK), heads)](
        mixed,
        projected[:, rules.channels + rules.value_size :],
        rules.decay_rate,
        rules.decay_bias,
        batch.prefill_offsets,
        batch.prefill_tiles,
        decayed_q,
        decayed_k,
        w,
        u,
        attended,
        chunk_decay,
        projected.stride(0),
        key_dim**-0.5,
        KEY_HEADS=rules.key_heads,
        VALUE_BLOCK=max(16, triton.next_power_of_2(value_dim)),
        CHUNKS_PER_TILE=PREFILL_TILE // CHUNK,
        LEVELS=CHUNK.bit_length() - 1,
        L2_EPS=L2_EPS,
        num_warps=PREPARE_WARPS,
        **sizes,
    )
    first = batch.num_decodes
    columns = max(16, min(VALUE_COLUMNS, triton.next_power_of_2(value_dim)))
    carried = batch.empty((tokens, rules.value_size), projected)
    _carry_kernel[(batch.num_prefills, heads, triton.cdiv(value_dim, columns))](
        decayed_q,
        decayed_k,
        w,
        u,
        attended,
        chunk_decay,
        batch.rows[first:],
        batch.lengths[first:],
        batch.prefill_offsets,
        state.memory,
        carried,
        state.memory.stride(0),
        COLUMNS=columns,
        num_warps=CARRY_WARPS,
        num_stages=carry_stages(sizes["KEY_BLOCK"], columns, kind.itemsize, shared_memory(device)),
        **sizes,
    )
    gate = projected[:, rules.channels : rules.channels + rules.value_size]
    gated_norm(carried, gate, rules, out)


def carry_stages(key_block: int, columns: int, element_bytes: int, shared: SharedMemory) -> int:
    """Pipeline stages of the carry kernel: two where the current and the next chunk fit in shared memory."""
    in_chunk = CHUNK * (3 * key_block + columns + CHUNK)
    return 2 if shared.holds((shared.copies * in_chunk + 2 * key_block * columns) * element_bytes) else 1


@jit
def _prepare_kernel(
    mixed,
    gates,
    decay_rate,
    decay_bias,
    offsets,
    tiles,
    decayed_q,
    decayed_k,
    w,
    u,
    attended,
    chunk_decay,
    gates_stride,
    scale,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS_PER_TILE: tl.constexpr,
    LEVELS: tl.constexpr,
    L2_EPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per chunk and value head."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    KEY_SIZE: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEY_SIZE + HEADS * VALUE_DIM
    kind: tl.constexpr = mixed.dtype.element_ty
    tile = tl.program_id(0) // CHUNKS_PER_TILE
    head = tl.program_id(1)
    prefill = tl.load(tiles + tile * 2)
    first = tl.load(tiles + tile * 2 + 1) + tl.program_id(0) % CHUNKS_PER_TILE * CHUNK
    offset = tl.load(offsets + prefill).to(tl.int64)
    count = tl.load(offsets + prefill + 1) - offset
    if first >= count:
        return
    place = tl.arange(0, CHUNK)
    token = offset + first + place
    token_inside = first + place < count
    later, earlier = place[:, None], place[None, :]

    gate = gates + token * gates_stride + head
    strength = tl.sigmoid(tl.load(gate, mask=token_inside, other=0.0).to(tl.float32))
    strength = tl.where(token_inside, strength, 0.0)
    decay_input = tl.load(gate + HEADS, mask=token_inside, other=0.0).to(tl.float32)
    log_decay = log_decay_of(decay_input, tl.load(decay_rate + head), tl.load(decay_bias + head))
    log_decay = tl.where(token_inside, log_decay, 0.0)
    total = tl.cumsum(log_decay, 0)
    last = tl.sum(log_decay, 0)
    between = tl.exp(tl.where(later >= earlier, total[:, None] - total[None, :], -float("inf")))

    key_dim = tl.arange(0, KEY_BLOCK)
    inside = token_inside[:, None] & (key_dim < KEY_DIM)[None, :]
    source = mixed + token[:, None] * CHANNELS + head // (HEADS // KEY_HEADS) * KEY_DIM + key_dim[None, :]
    target = (token[:, None] * HEADS + head) * KEY_DIM + key_dim[None, :]
    k = tl.load(source + KEY_SIZE, mask=inside, other=0.0).to(tl.float32)
    k *= tl.rsqrt(tl.sum(k * k, 1) + L2_EPS)[:, None]
    tl.store(decayed_k + target, (k * tl.exp(last - total)[:, None]).to(kind), mask=inside)
    k = k.to(kind)
    q = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    q *= (tl.rsqrt(tl.sum(q * q, 1) + L2_EPS) * scale)[:, None]
    tl.store(decayed_q + target, (q * tl.exp(total)[:, None]).to(kind), mask=inside)
    scores = tl.dot(q.to(kind), tl.trans(k), input_precision="tf32x3") * between
    where = (token[:, None] * HEADS + head) * CHUNK + earlier
    tl.store(attended + where, scores.to(kind), mask=token_inside[:, None])

    # (1 + system)⁻¹, from blocks of size 1: [[P, 0], [Q, R]]⁻¹ = [[P⁻¹, 0], [−R⁻¹ Q P⁻¹, R⁻¹]] for all block pairs.
    system = tl.dot(k, tl.trans(k), input_precision="tf32x3") * between * strength[:, None]
    system = tl.where(later > earlier, system, 0.0)
    inverse = tl.where(later == earlier, 1.0, 0.0)
    for level in range(LEVELS):
        corner = ((later >> level) % 2 == 1) & ((later >> level) - 1 == (earlier >> level))
        joined = tl.dot(tl.where(corner, system, 0.0), inverse, input_precision="tf32x3")
        inverse -= tl.dot(inverse, joined, input_precision="tf32x3")

    inverse = inverse.to(kind)
    reading = (k.to(tl.float32) * (strength * tl.exp(total))[:, None]).to(kind)
    tl.store(w + target, tl.dot(inverse, reading, input_precision="tf32x3").to(kind), mask=inside)
    value_dim = tl.arange(0, VALUE_BLOCK)
    inside = token_inside[:, None] & (value_dim < VALUE_DIM)[None, :]
    source = mixed + token[:, None] * CHANNELS + 2 * KEY_SIZE + head * VALUE_DIM + value_dim[None, :]
    v = tl.load(source, mask=inside, other=0.0).to(tl.float32) * strength[:, None]
    target = (token[:, None] * HEADS + head) * VALUE_DIM + value_dim[None, :]
    tl.store(u + target, tl.dot(inverse, v.to(kind), input_precision="tf32x3").to(kind), mask=inside)
    tl.store(chunk_decay + (offset + first) * HEADS + head, tl.exp(last))


@jit(do_not_specialize_on_alignment=["rows", "lengths"])
def _carry_kernel(
    decayed_q,
    decayed_k,
    w,
    u,
    attended,
    chunk_decay,
    rows,
    lengths,
    offsets,
    memory,
    out,
    memory_stride,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row, value head and COLUMNS of its memory."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    kind: tl.constexpr = u.dtype.element_ty
    prefill = tl.program_id(0)
    head = tl.program_id(1)
    offset = tl.load(offsets + prefill).to(tl.int64)
    count = tl.load(offsets + prefill + 1) - offset
    is_new = tl.load(lengths + prefill) == count
    key_dim = tl.arange(0, KEY_BLOCK)
    key_inside = key_dim < KEY_DIM
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    column_inside = column < VALUE_DIM
    where = memory + tl.load(rows + prefill) * memory_stride + head * KEY_DIM * VALUE_DIM
    where = where + key_dim[:, None] * VALUE_DIM + column[None, :]
    inside = key_inside[:, None] & column_inside[None, :]
    known = tl.load(where, mask=inside, other=0.0)  # [key dim, columns]
    known = tl.where(is_new, 0.0, known)
    place = tl.arange(0, CHUNK)
    for first in range(0, count, CHUNK):
        token = offset + first + place
        token_inside = first + place < count
        by_head = token * HEADS + head
        by_key = by_head[:, None] * KEY_DIM + key_dim[None, :]
        key_mask = token_inside[:, None] & key_inside[None, :]
        by_column = by_head[:, None] * VALUE_DIM + column[None, :]
        column_mask = token_inside[:, None] & column_inside[None, :]
        rounded = known.to(kind)
        correction = tl.load(u + by_column, mask=column_mask, other=0.0).to(tl.float32)
        reading = tl.load(w + by_key, mask=key_mask, other=0.0)
        correction -= tl.dot(reading, rounded, input_precision="tf32x3")
        correction = correction.to(kind)
        query = tl.load(decayed_q + by_key, mask=key_mask, other=0.0)
        mixed = tl.dot(query, rounded, input_precision="tf32x3")
        within = by_head[:, None] * CHUNK + place[None, :]
        scores = tl.load(attended + within, mask=token_inside[:, None], other=0.0)
        mixed += tl.dot(scores, correction, input_precision="tf32x3")
        tl.store(out + by_column, mixed.to(out.dtype.element_ty), mask=column_mask)
        key = tl.load(decayed_k + by_key, mask=key_mask, other=0.0)
        known *= tl.load(chunk_decay + (offset + first) * HEADS + head)
        known += tl.dot(tl.trans(key), correction, input_precision="tf32x3")
    tl.store(where, known, mask=inside)
