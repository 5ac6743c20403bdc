"""A vector as the codes of packed units are multiplied with it, and the product.

A unit has eight columns, so a vector becomes eight tensors of numbers, one for each slot of the units, and each eight
numbers that meet a unit become integers with a power of two of their own (`fixed_point.py`).
"""

from __future__ import annotations

from cortex.neuron.kernels.jit import jit, tl
from cortex.neuron.kernels.quantised.fixed_point import (
    EXACT,
    code_dot,
    code_halves,
    half_code_dot,
    power_of_two,
    signed_code_dot,
    split_bytes,
    spread_bytes,
    wide_code_dot,
)
from cortex.neuron.kernels.quantised.levels import level_bytes
from cortex.neuron.kernels.quantised.unpack import high_half, low_half


@jit
def prepared_vector(
    x,
    norm_weight,
    start,
    INPUTS: tl.constexpr,
    PAIRED: tl.constexpr,
    NORM: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    PTX: tl.constexpr,
):
    """BLOCK_CHUNKS chunks of x times the norm's weights, as `times_vector` takes them; and sums of squares of x."""
    squares = tl.zeros((BLOCK_CHUNKS * 16,), tl.float32)
    a0, a1, a2, a3, b0, b1, b2, b3 = _values(x, start, INPUTS, PAIRED, BLOCK_CHUNKS)
    if NORM:
        squares += a0 * a0 + a1 * a1 + a2 * a2 + a3 * a3 + b0 * b0 + b1 * b1 + b2 * b2 + b3 * b3
        w0, w1, w2, w3, v0, v1, v2, v3 = _values(norm_weight, start, INPUTS, PAIRED, BLOCK_CHUNKS)
        a0, a1, a2, a3 = a0 * w0, a1 * w1, a2 * w2, a3 * w3
        b0, b1, b2, b3 = b0 * v0, b1 * v1, b2 * v2, b3 * v3
    sum_0, sum_1 = a0 + b0 + a1 + b1, a2 + b2 + a3 + b3
    factor, step = power_of_two(a0, a1, a2, a3, b0, b1, b2, b3)
    offset_0, offset_1 = step * EXACT, step * EXACT
    if GROUP == 32:
        high_0, low_0 = split_bytes(a0, a2, b0, b2, factor, PTX)
        high_1, low_1 = split_bytes(a1, a3, b1, b3, factor, PTX)
        sum_0 += sum_1
    else:
        high_0, low_0 = split_bytes(a0, a1, b0, b1, factor, PTX)
        high_1, low_1 = split_bytes(a2, a3, b2, b3, factor, PTX)
    if ZERO >= 0:
        offset_0, offset_1 = offset_0 + sum_0 * ZERO, offset_1 + sum_1 * ZERO
    return (high_0, low_0, high_1, low_1, step, offset_0, offset_1, sum_0, sum_1), squares


@jit
def _values(x, start, INPUTS: tl.constexpr, PAIRED: tl.constexpr, BLOCK_CHUNKS: tl.constexpr):
    """A vector's numbers by the slots of the units they are multiplied with. → a_j (h = 0), b_j (h = 1): [units]"""
    pair = start * 64 + tl.arange(0, BLOCK_CHUNKS * 64)
    if PAIRED:
        p0, p1, p2, p3 = _by_slot(tl.load(x + pair, mask=pair < INPUTS // 2, other=0), BLOCK_CHUNKS)
        a0, a1, a2, a3 = low_half(p0), low_half(p1), low_half(p2), low_half(p3)
        b0, b1, b2, b3 = high_half(p0), high_half(p1), high_half(p2), high_half(p3)
    else:
        inside = pair < INPUTS // 2
        a0, a1, a2, a3 = _by_slot(tl.load(x + pair * 2, mask=inside, other=0.0).to(tl.float32), BLOCK_CHUNKS)
        b0, b1, b2, b3 = _by_slot(tl.load(x + pair * 2 + 1, mask=inside, other=0.0).to(tl.float32), BLOCK_CHUNKS)
    return a0, a1, a2, a3, b0, b1, b2, b3


@jit
def _by_slot(pairs, BLOCK_CHUNKS: tl.constexpr):
    """[chunks · (v, j, t)] → for each j: [chunks · (t, v)]"""
    pairs = tl.permute(tl.reshape(pairs, (BLOCK_CHUNKS, 4, 4, 4)), (0, 3, 1, 2))
    even, odd = tl.split(tl.reshape(pairs, (BLOCK_CHUNKS * 16, 2, 2)))
    p0, p2 = tl.split(even)
    p1, p3 = tl.split(odd)
    return p0, p1, p2, p3


@jit
def times_vector(
    words,
    vector,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    LEVELS: tl.constexpr,
    PTX: tl.constexpr,
):
    """Sums of weights times numbers, by unit. → [BLOCK_OUT, units]"""
    word, above, scale_0, scale_1 = words
    high_0, low_0, high_1, low_1, step, offset_0, offset_1, sum_0, sum_1 = vector
    high_0, low_0, high_1, low_1 = high_0[None, :], low_0[None, :], high_1[None, :], low_1[None, :]
    step, offset_0, offset_1, sum_0, sum_1 = (
        step[None, :], offset_0[None, :], offset_1[None, :], sum_0[None, :], sum_1[None, :]
    )  # fmt: skip
    if LEVELS:
        even, odd = level_bytes(word, LEVELS, PTX)
        return low_half(scale_0) * (signed_code_dot(even, odd, high_0, low_0, high_1, low_1, PTX) * step)
    even, odd = _code_bytes(word, above, LOW_BITS, HIGH_BITS, PTX)
    if GROUP == 32:
        if LOW_BITS == 8:
            dot = wide_code_dot(even, odd, high_0, low_0, high_1, low_1, PTX) * step
        else:
            dot = code_dot(even, odd, high_0, low_0, high_1, low_1, PTX) * step - offset_0
        return low_half(scale_0) * dot + high_half(scale_0) * sum_0
    codes_0, codes_1 = code_halves(even, odd, PTX)
    dot_0 = half_code_dot(codes_0, high_0, low_0, PTX) * step - offset_0
    dot_1 = half_code_dot(codes_1, high_1, low_1, PTX) * step - offset_1
    if ZERO >= 0:
        return low_half(scale_0) * dot_0 + high_half(scale_0) * dot_1
    first = low_half(scale_0) * dot_0 + high_half(scale_0) * sum_0
    return first + low_half(scale_1) * dot_1 + high_half(scale_1) * sum_1


@jit
def _code_bytes(low, high, LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr, PTX: tl.constexpr):
    """The codes of a unit as bytes: slots j = 0, 2 and j = 1, 3. Bytes 0 and 1 are of h = 0, bytes 2 and 3 of h = 1."""
    if LOW_BITS == 8:
        even, odd = low, high
    elif LOW_BITS == 4:
        even, odd = low & 0x0F0F0F0F, (low >> 4) & 0x0F0F0F0F
    else:
        both = spread_bytes(low, PTX)
        even = (both & 0x00030003) | ((both >> 4) & 0x03000300)
        odd = ((both >> 2) & 0x00030003) | ((both >> 6) & 0x03000300)
    if HIGH_BITS == 2:
        both = spread_bytes(high, PTX)
        even |= _moved(both, LOW_BITS, 0x00030003, LOW_BITS) | _moved(both, LOW_BITS - 4, 0x03000300, LOW_BITS)
        odd |= _moved(both, LOW_BITS - 2, 0x00030003, LOW_BITS) | _moved(both, LOW_BITS - 6, 0x03000300, LOW_BITS)
    elif HIGH_BITS == 1:
        both = spread_bytes((high & 0x0F) | ((high & 0xF0) << 4), PTX)
        even |= _moved(both, LOW_BITS, 0x00010001, LOW_BITS) | _moved(both, LOW_BITS - 2, 0x01000100, LOW_BITS)
        odd |= _moved(both, LOW_BITS - 1, 0x00010001, LOW_BITS) | _moved(both, LOW_BITS - 3, 0x01000100, LOW_BITS)
    return even, odd


@jit
def _moved(bits, LEFT: tl.constexpr, MASK: tl.constexpr, SHIFT: tl.constexpr):
    """Bits moved to the left, those of MASK << SHIFT only. LEFT may be negative."""
    if LEFT >= 0:
        return (bits << LEFT) & (MASK << SHIFT)
    return (bits >> -LEFT) & (MASK << SHIFT)
