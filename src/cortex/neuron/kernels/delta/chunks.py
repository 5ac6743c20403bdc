"""Prefill rows of a gated delta net, in chunks, with the mathematics of `gated_delta.delta_chunked`.

The first kernel prepares all chunks at once: the inverse of the triangular system of each chunk, and the scores between
its queries and keys. The second kernel carries the memory of each head from chunk to chunk, a few columns per program.
Both read queries and keys as the convolution left them: their norms and the decays are factors of each token, by which
the rows of the products are multiplied. Reference: `gated_delta.gated_delta_reference`.
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
from cortex.neuron.kernels.recurrent.rows import chunk_bounds
from cortex.neuron.kernels.shared_memory import SharedMemory, shared_memory

VALUE_COLUMNS = 32
"""Columns of the memory of a head that one program carries."""
SOLVED_LEVELS = 3
"""Blocks of 2^SOLVED_LEVELS rows of the triangular system are solved row by row."""
PREPARE_WARPS, CARRY_WARPS = 4, 4


def delta_chunks(projected: Tensor, rules: DeltaRules, batch: Batch, state: DeltaState, out: Tensor) -> None:
    """projected: [prefill tokens, projected size], out: [prefill tokens, value size], contiguous. Advances the state
    of the rows."""
    assert batch.prefill_tiles is not None
    assert batch.prefill_offsets is not None
    assert batch.prefill_cuts is not None
    device, kind, tokens = projected.device, projected.dtype, len(projected)
    heads, key_dim, value_dim = rules.value_heads, rules.key_dim, rules.value_dim
    mixed = torch.empty((tokens, rules.channels), dtype=kind, device=device)
    conv_chunks(projected[:, : rules.channels], rules.conv_weight, state.recent, batch, mixed)
    inverses, scores = torch.empty((2, tokens, heads, CHUNK), dtype=kind, device=device)
    factors = torch.empty((3, heads, tokens), dtype=torch.float32, device=device)
    # Stored at the first token of each chunk.
    chunk_decay = torch.empty((tokens, heads), dtype=torch.float32, device=device)
    sizes = {
        "HEADS": heads,
        "KEY_HEADS": rules.key_heads,
        "KEY_DIM": key_dim,
        "KEY_BLOCK": max(16, triton.next_power_of_2(key_dim)),
        "VALUE_DIM": value_dim,
        "CHUNK": CHUNK,
        **launch_options(device),
    }
    # A row that is cut may have one chunk more than its tiles.
    _prepare_kernel[(len(batch.prefill_tiles) * (PREFILL_TILE // CHUNK) + batch.num_prefills, heads)](
        mixed,
        projected[:, rules.channels + rules.value_size :],
        rules.decay_rate,
        rules.decay_bias,
        batch.prefill_offsets,
        batch.prefill_cuts,
        batch.prefill_tiles,
        len(batch.prefill_tiles),
        inverses,
        scores,
        factors,
        chunk_decay,
        projected.stride(0),
        tokens,
        key_dim**-0.5,
        CHUNKS_PER_TILE=PREFILL_TILE // CHUNK,
        LEVELS=CHUNK.bit_length() - 1,
        SOLVED_LEVELS=SOLVED_LEVELS,
        L2_EPS=L2_EPS,
        num_warps=PREPARE_WARPS,
        **sizes,
    )
    first = batch.num_decodes
    columns = max(16, min(VALUE_COLUMNS, triton.next_power_of_2(value_dim)))
    carried = torch.empty((tokens, rules.value_size), dtype=kind, device=device)
    _carry_kernel[(batch.num_prefills, heads, triton.cdiv(value_dim, columns))](
        mixed,
        inverses,
        scores,
        factors,
        chunk_decay,
        batch.rows[first:],
        batch.lengths[first:],
        batch.prefill_offsets,
        batch.prefill_cuts,
        state.memory,
        carried,
        tokens,
        state.memory.stride(0),
        COLUMNS=columns,
        num_warps=CARRY_WARPS,
        num_stages=carry_stages(sizes["KEY_BLOCK"], columns, kind.itemsize, shared_memory(device)),
        **sizes,
    )
    gate = projected[:, rules.channels : rules.channels + rules.value_size]
    gated_norm(carried, gate, rules, out, batch.prefill_offsets[-1:])


def carry_stages(key_block: int, columns: int, element_bytes: int, shared: SharedMemory) -> int:
    """Pipeline stages of the carry kernel: with three, a chunk arrives while the one before it is computed; with two,
    it is on its way when that one is done."""
    in_chunk = CHUNK * (2 * key_block + columns + 2 * CHUNK)
    operands = (key_block + 2 * CHUNK) * columns
    for stages in (3, 2):
        if shared.holds(((stages - 2 + shared.copies) * in_chunk + operands) * element_bytes):
            return stages
    return 1


@jit(do_not_specialize=["num_tiles", "factors_stride"], do_not_specialize_on_alignment=["cuts"])
def _prepare_kernel(
    mixed,
    gates,
    decay_rate,
    decay_bias,
    offsets,
    cuts,
    tiles,
    num_tiles,
    inverses,
    scores,
    factors,
    chunk_decay,
    gates_stride,
    factors_stride,
    scale,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS_PER_TILE: tl.constexpr,
    LEVELS: tl.constexpr,
    SOLVED_LEVELS: tl.constexpr,
    L2_EPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per chunk and value head: the chunks of the tiles, then one more for each row."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    KEY_SIZE: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEY_SIZE + HEADS * VALUE_DIM
    kind: tl.constexpr = mixed.dtype.element_ty
    tile, number = tl.program_id(0) // CHUNKS_PER_TILE, tl.program_id(0) % CHUNKS_PER_TILE
    head = tl.program_id(1)
    is_tiled = tile < num_tiles
    prefill = tl.load(tiles + tile * 2, mask=is_tiled, other=tl.program_id(0) - num_tiles * CHUNKS_PER_TILE)
    offset = tl.load(offsets + prefill).to(tl.int64)
    count = tl.load(offsets + prefill + 1) - offset
    index = tl.load(tiles + tile * 2 + 1, mask=is_tiled, other=0) // CHUNK + number
    index = tl.where(is_tiled, index, tl.cdiv(count, CHUNK * CHUNKS_PER_TILE) * CHUNKS_PER_TILE)
    first, end = chunk_bounds(index, tl.load(cuts + prefill * 2), count, CHUNK)
    if first >= count:
        return
    place = tl.arange(0, CHUNK)
    token = offset + first
    token_inside = first + place < end
    later, earlier = place[:, None], place[None, :]

    key_dim = tl.arange(0, KEY_BLOCK)
    inside = token_inside[:, None] & (key_dim < KEY_DIM)[None, :]
    source = mixed + token * CHANNELS + head // (HEADS // KEY_HEADS) * KEY_DIM
    source += place[:, None] * CHANNELS + key_dim[None, :]
    k = tl.load(source + KEY_SIZE, mask=inside, other=0.0)
    q = tl.load(source, mask=inside, other=0.0)
    gate = gates + token * gates_stride + place * gates_stride + head
    strength = tl.sigmoid(tl.load(gate, mask=token_inside, other=0.0).to(tl.float32))
    strength = tl.where(token_inside, strength, 0.0)
    decay_input = tl.load(gate + HEADS, mask=token_inside, other=0.0).to(tl.float32)
    log_decay = log_decay_of(decay_input, tl.load(decay_rate + head), tl.load(decay_bias + head))
    log_decay = tl.where(token_inside, log_decay, 0.0)
    total = tl.cumsum(log_decay, 0)
    last = tl.sum(log_decay, 0)
    k_gain, q_gain = _unit_gain(k, L2_EPS), _unit_gain(q, L2_EPS) * scale
    factor = factors + head * factors_stride + token + place
    tl.store(factor, k_gain * tl.exp(total), mask=token_inside)
    tl.store(factor + HEADS * factors_stride, q_gain * tl.exp(total), mask=token_inside)
    tl.store(factor + 2 * HEADS * factors_stride, k_gain * tl.exp(last - total), mask=token_inside)
    tl.store(chunk_decay + token * HEADS + head, tl.exp(last))

    between = tl.exp(tl.where(later >= earlier, total[:, None] - total[None, :], -float("inf"))) * k_gain[None, :]
    system = tl.dot(k, tl.trans(k), input_precision="tf32x3") * between * (strength * k_gain)[:, None]
    system = tl.where(later > earlier, system, 0.0)
    score = tl.dot(q, tl.trans(k), input_precision="tf32x3") * between * q_gain[:, None]
    where = (token * HEADS + head) * CHUNK + later * (HEADS * CHUNK) + earlier
    tl.store(scores + where, score.to(kind), mask=token_inside[:, None])
    inverse = unit_inverse(system, LEVELS, SOLVED_LEVELS, kind)
    tl.store(inverses + where, (inverse * strength[None, :]).to(kind), mask=token_inside[:, None])


@jit
def _unit_gain(x, L2_EPS: tl.constexpr):
    """The factors that give the rows of x unit length, float32."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + L2_EPS)


@jit(do_not_specialize=["factors_stride"], do_not_specialize_on_alignment=["rows", "lengths", "cuts"])
def _carry_kernel(
    mixed,
    inverses,
    scores,
    factors,
    chunk_decay,
    rows,
    lengths,
    offsets,
    cuts,
    memory,
    out,
    factors_stride,
    memory_stride,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
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
    KEY_SIZE: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEY_SIZE + HEADS * VALUE_DIM
    kind: tl.constexpr = mixed.dtype.element_ty
    prefill = tl.program_id(0)
    head = tl.program_id(1)
    offset = tl.load(offsets + prefill).to(tl.int64)
    count = tl.load(offsets + prefill + 1) - offset
    if count == 0:
        return
    is_new = tl.load(lengths + prefill) == count
    key_dim = tl.arange(0, KEY_BLOCK)
    key_inside = key_dim < KEY_DIM
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    column_inside = column < VALUE_DIM
    row, slot = tl.load(rows + prefill), tl.load(cuts + prefill * 2 + 1).to(tl.int64)
    cut = tl.load(cuts + prefill * 2).to(tl.int64)
    where = memory + head * KEY_DIM * VALUE_DIM + key_dim[:, None] * VALUE_DIM + column[None, :]
    inside = key_inside[:, None] & column_inside[None, :]
    known = tl.load(where + row * memory_stride, mask=inside, other=0.0)  # [key dim, columns]
    known = tl.where(is_new, 0.0, known)
    place = tl.arange(0, CHUNK)
    by_key = head // (HEADS // KEY_HEADS) * KEY_DIM + place[:, None] * CHANNELS + key_dim[None, :]
    by_value = 2 * KEY_SIZE + head * VALUE_DIM + place[:, None] * CHANNELS + column[None, :]
    by_column = head * VALUE_DIM + place[:, None] * (HEADS * VALUE_DIM) + column[None, :]
    within = head * CHUNK + place[:, None] * (HEADS * CHUNK) + place[None, :]
    factor = factors + head * factors_stride + offset + place
    for index in range(tl.cdiv(cut, CHUNK) + tl.cdiv(count - cut, CHUNK)):
        first, end = chunk_bounds(index, cut, count, CHUNK)
        token = offset + first
        decay = tl.load(chunk_decay + token * HEADS + head)
        token_inside = first + place < end
        k_read = tl.load(factor + first, mask=token_inside, other=0.0)
        q_read = tl.load(factor + HEADS * factors_stride + first, mask=token_inside, other=0.0)
        k_write = tl.load(factor + 2 * HEADS * factors_stride + first, mask=token_inside, other=0.0)
        key_mask = token_inside[:, None] & key_inside[None, :]
        column_mask = token_inside[:, None] & column_inside[None, :]
        source = mixed + token * CHANNELS
        key = tl.load(source + KEY_SIZE + by_key, mask=key_mask, other=0.0)
        query = tl.load(source + by_key, mask=key_mask, other=0.0)
        value = tl.load(source + by_value, mask=column_mask, other=0.0).to(tl.float32)
        inverse = tl.load(inverses + token * (HEADS * CHUNK) + within, mask=token_inside[:, None], other=0.0)
        score = tl.load(scores + token * (HEADS * CHUNK) + within, mask=token_inside[:, None], other=0.0)
        rounded = known.to(kind)
        value -= tl.dot(key, rounded, input_precision="tf32x3") * k_read[:, None]
        correction = tl.dot(inverse, value.to(kind), input_precision="tf32x3")
        found = tl.dot(query, rounded, input_precision="tf32x3") * q_read[:, None]
        found += tl.dot(score, correction.to(kind), input_precision="tf32x3")
        if kind == tl.float16:  # which cannot hold a correction times the factor of a key near zero
            key = (key.to(tl.float32) * k_write[:, None]).to(kind)
            written = correction.to(kind)
        else:
            written = (correction * k_write[:, None]).to(kind)
        known = known * decay + tl.dot(tl.trans(key), written, input_precision="tf32x3")
        tl.store(out + token * (HEADS * VALUE_DIM) + by_column, found.to(out.dtype.element_ty), mask=column_mask)
        if end == cut:
            tl.store(where + slot * memory_stride, known, mask=inside)
    tl.store(where + row * memory_stride, known, mask=inside)


@jit
def unit_inverse(system, LEVELS: tl.constexpr, FIRST: tl.constexpr, kind: tl.constexpr):
    """(1 + system)⁻¹, both [2^LEVELS, 2^LEVELS] float32; `system` is strictly lower triangular.
    The values of both are at most about 1, as with keys of unit length, decays, and strengths below 1.

    The blocks of 2^FIRST rows on the diagonal are solved row by row. Then pairs of blocks are joined, all pairs of a
    size at once: [[P, 0], [Q, R]]⁻¹ = [[P⁻¹, 0], [−R⁻¹ Q P⁻¹, R⁻¹]].
    """
    SIZE: tl.constexpr = 1 << LEVELS
    place = tl.arange(0, SIZE)
    later, earlier = place[:, None], place[None, :]
    inverse = _inverse_of_blocks(system, SIZE, 1 << FIRST)
    for level in tl.static_range(FIRST, LEVELS):
        corner = ((later >> level) % 2 == 1) & ((later >> level) - 1 == (earlier >> level))
        joined = _dot(tl.where(corner, system, 0.0), inverse, kind)
        inverse -= _dot(inverse, joined, kind)
    return inverse


@jit
def _inverse_of_blocks(system, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The inverse of the blocks on the diagonal, zero elsewhere."""
    BLOCKS: tl.constexpr = SIZE // BLOCK
    number, place = tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    on_diagonal = (number[:, None] == number[None, :])[:, None, :, None]
    blocks = tl.sum(tl.where(on_diagonal, system.reshape(BLOCKS, BLOCK, BLOCKS, BLOCK), 0.0), 2)
    columns = tl.permute(blocks, (0, 2, 1))
    row, column = place[None, :, None], place[None, None, :]
    inverse = tl.zeros((BLOCKS, BLOCK, BLOCK), tl.float32) + tl.where(row == column, 1.0, 0.0)
    for index in range(1, BLOCK):
        weights = tl.sum(tl.where(column == index, columns, 0.0), 2)
        known = tl.sum(weights[:, :, None] * inverse, 1)
        inverse -= tl.where(row == index, known[:, None, :], 0.0)
    return tl.where(on_diagonal, inverse[:, :, None, :], 0.0).reshape(SIZE, SIZE)


@jit
def _dot(a, b, kind: tl.constexpr):
    """The product of two matrices whose values are at most about 1, float32. For layers in a type of 16 bits they are
    rounded to float16, which has three more bits than bfloat16, the type of the result's readers."""
    if kind == tl.float32:
        return tl.dot(a, b, input_precision="tf32x3")
    return tl.dot(a.to(tl.float16), b.to(tl.float16))
