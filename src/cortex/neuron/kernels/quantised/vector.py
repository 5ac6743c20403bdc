"""A vector in the form that packed units are multiplied with, and their dot products.

A unit has eight columns, so a vector becomes eight tensors, one for each slot of the units. The eight values that are
multiplied with a unit become integers with a power of two of their own.
"""

from __future__ import annotations

from cortex.neuron.kernels.jit import constant, jit, tl
from cortex.neuron.kernels.quantised.codebook import codebook_bytes
from cortex.neuron.kernels.quantised.layout import OWN_ZERO
from cortex.neuron.kernels.quantised.unpack import group_scale, group_zero, high_half, low_half

EXACT = constant(12582912.0)
"""1.5 · 2²³, 0x4B400000"""
_OWN_ZERO = constant(OWN_ZERO)
_WIDE_OFFSET = constant(256.0 * 12582912.0 + 8388608.0)
_SIGNED_OFFSET = constant(256.0 * 12582912.0 + 12582912.0)


def _ptx(registers: str, *lines: str) -> str:
    return "{\n .reg .b32 " + registers + ";\n " + "\n ".join(lines) + "\n}\n"


_SPLIT = constant(
    _ptx(
        "first, second",
        "prmt.b32 first, $2, $3, 0x5410;",
        "prmt.b32 second, $4, $5, 0x5410;",
        "prmt.b32 $0, first, second, 0x7531;",
        "prmt.b32 $1, first, second, 0x6420;",
    )
)
_HALVES = constant("prmt.b32 $0, $2, $3, 0x6240;\n prmt.b32 $1, $2, $3, 0x7351;")
_INTERLEAVED = constant("prmt.b32 $0, $2, $3, 0x5140;\n prmt.b32 $1, $2, $3, 0x7362;")
_MERGED = constant("lop3.b32 $0, $1, $2, 0x0F0F0F0F, 0xE4;")
_DOT = constant(
    _ptx(
        "high, low",
        "dp4a.s32.u32 high, $3, $1, 0;",
        "dp4a.u32.u32 low, $4, $1, 0x4B400000;",
        "dp4a.s32.u32 high, $5, $2, high;",
        "dp4a.u32.u32 low, $6, $2, low;",
        "mad.lo.s32 $0, high, 256, low;",
    )
)
_HALF_DOT = constant(
    _ptx(
        "high, low",
        "dp4a.s32.u32 high, $2, $1, 0;",
        "dp4a.u32.u32 low, $3, $1, 0x4B400000;",
        "mad.lo.s32 $0, high, 256, low;",
    )
)
_WIDE_DOT = constant(
    _ptx(
        "high, low",
        "dp4a.s32.u32 high, $4, $2, 0x4B400000;",
        "dp4a.u32.u32 low, $5, $2, 0x4B000000;",
        "dp4a.s32.u32 $0, $6, $3, high;",
        "dp4a.u32.u32 $1, $7, $3, low;",
    )
)


_SIGNED_DOT = constant(
    _ptx(
        "high, low",
        "dp4a.s32.s32 high, $4, $2, 0x4B400000;",
        "dp4a.u32.s32 low, $5, $2, 0x4B400000;",
        "dp4a.s32.s32 $0, $6, $3, high;",
        "dp4a.u32.s32 $1, $7, $3, low;",
    )
)


@jit
def power_of_two(a0, a1, a2, a3, b0, b1, b2, b3):
    """What makes integers of at most 2¹⁴ of eight values, and its inverse. Both are powers of two."""
    largest = tl.maximum(tl.maximum(tl.abs(a0), tl.abs(a1)), tl.maximum(tl.abs(a2), tl.abs(a3)))
    largest = tl.maximum(largest, tl.maximum(tl.maximum(tl.abs(b0), tl.abs(b1)), tl.maximum(tl.abs(b2), tl.abs(b3))))
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) & 0x7F800000, 30 << 23)
    factor = ((254 << 23) - exponent).to(tl.float32, bitcast=True) * 8192.0
    return factor, exponent.to(tl.float32, bitcast=True) * 0.0001220703125


@jit
def split_bytes(n0, n1, n2, n3, factor, PTX: tl.constexpr):
    """Four values times `factor` as integers of 16 bits: their high bytes as one word, their low bytes as another."""
    q0, q1 = _integer(n0, factor), _integer(n1, factor)
    q2, q3 = _integer(n2, factor), _integer(n3, factor)
    if PTX:
        high, low = tl.inline_asm_elementwise(
            _SPLIT, "=&r,=&r,r,r,r,r", [q0, q1, q2, q3], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        low = (q0 & 0xFF) | ((q1 & 0xFF) << 8) | ((q2 & 0xFF) << 16) | ((q3 & 0xFF) << 24)
        high = ((q0 >> 8) & 0xFF) | (q1 & 0xFF00) | ((q2 & 0xFF00) << 8) | ((q3 & 0xFF00) << 16)
    return high, low


@jit
def _integer(number, factor):
    """The rounded product, in the low 16 bits."""
    return (number * factor + EXACT).to(tl.int32, bitcast=True)


@jit
def code_halves(even, odd, PTX: tl.constexpr):
    """Codes of j = 0, 2 and j = 1, 3 → of j = 0, 1 and j = 2, 3."""
    if PTX:
        first, second = tl.inline_asm_elementwise(
            _HALVES, "=&r,=&r,r,r", [even, odd], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        first = (even & 0x00FF00FF) | ((odd & 0x00FF00FF) << 8)
        second = ((even >> 8) & 0x00FF00FF) | (odd & -16711936)
    return first, second


@jit
def interleaved_bytes(even, odd, PTX: tl.constexpr):
    """Bytes 0, 1, 2, 3 of two words → two words, of bytes 0, 0, 1, 1 and 2, 2, 3, 3 by turns."""
    if PTX:
        first, second = tl.inline_asm_elementwise(
            _INTERLEAVED, "=&r,=&r,r,r", [even, odd], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        first = (even & 0xFF) | ((odd & 0xFF) << 8) | ((even & 0xFF00) << 8) | ((odd & 0xFF00) << 16)
        second = ((even >> 16) & 0xFF) | ((odd >> 8) & 0xFF00) | ((even >> 8) & 0xFF0000) | (odd & -16777216)
    return first, second


@jit
def merged_nibbles(low, high, PTX: tl.constexpr):
    """The low four bits of each byte of one word and the high four of another."""
    if PTX:
        return tl.inline_asm_elementwise(_MERGED, "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1)
    return (low & 0x0F0F0F0F) | (high & -252645136)


@jit
def code_dot(even, odd, high_0, low_0, high_1, low_1, PTX: tl.constexpr):
    """EXACT + eight codes of up to five bits times integers."""
    if PTX:
        return tl.inline_asm_elementwise(
            _DOT, "=r,r,r,r,r,r,r", [even, odd, high_0, low_0, high_1, low_1], dtype=tl.float32, is_pure=True, pack=1
        )
    return _sum(even, odd, high_0, low_0, high_1, low_1).to(tl.float32) + EXACT


@jit
def half_code_dot(codes, high, low, PTX: tl.constexpr):
    """EXACT + four codes of up to six bits times integers."""
    if PTX:
        return tl.inline_asm_elementwise(
            _HALF_DOT, "=r,r,r,r", [codes, high, low], dtype=tl.float32, is_pure=True, pack=1
        )
    return (_byte_dot(codes, high, True) * 256 + _byte_dot(codes, low, False)).to(tl.float32) + EXACT


@jit
def wide_code_dot(even, odd, high_0, low_0, high_1, low_1, PTX: tl.constexpr):
    """Eight codes of eight bits times integers."""
    if PTX:
        high, low = tl.inline_asm_elementwise(
            _WIDE_DOT, "=&r,=&r,r,r,r,r,r,r", [even, odd, high_0, low_0, high_1, low_1],
            dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
        return (high * 256.0 - _WIDE_OFFSET) + low
    return _sum(even, odd, high_0, low_0, high_1, low_1).to(tl.float32)


@jit
def signed_code_dot(even, odd, high_0, low_0, high_1, low_1, PTX: tl.constexpr):
    """Eight codes that are signed bytes times integers."""
    if PTX:
        high, low = tl.inline_asm_elementwise(
            _SIGNED_DOT, "=&r,=&r,r,r,r,r,r,r", [even, odd, high_0, low_0, high_1, low_1],
            dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
        return (high * 256.0 - _SIGNED_OFFSET) + low
    return _sum(even, odd, high_0, low_0, high_1, low_1, True).to(tl.float32)


@jit
def _sum(even, odd, high_0, low_0, high_1, low_1, SIGNED: tl.constexpr = False):
    high = _byte_dot(even, high_0, True, SIGNED) + _byte_dot(odd, high_1, True, SIGNED)
    return high * 256 + _byte_dot(even, low_0, False, SIGNED) + _byte_dot(odd, low_1, False, SIGNED)


@jit
def _byte_dot(codes, values, SIGNED: tl.constexpr, SIGNED_CODES: tl.constexpr = False):
    """Σ byte of codes · byte of values. SIGNED, SIGNED_CODES: whether those of the values and of the codes are."""
    total = _byte(codes, 0, SIGNED_CODES) * _byte(values, 0, SIGNED)
    total += _byte(codes, 1, SIGNED_CODES) * _byte(values, 1, SIGNED)
    total += _byte(codes, 2, SIGNED_CODES) * _byte(values, 2, SIGNED)
    return total + _byte(codes, 3, SIGNED_CODES) * _byte(values, 3, SIGNED)


@jit
def _byte(words, INDEX: tl.constexpr, SIGNED: tl.constexpr):
    if SIGNED:
        return (words << (24 - 8 * INDEX)) >> 24
    return (words >> (8 * INDEX)) & 0xFF


@jit
def prepared_vector(
    x,
    gains,
    start,
    INPUTS: tl.constexpr,
    PAIRED: tl.constexpr,
    NORM: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    PTX: tl.constexpr,
):
    """BLOCK_CHUNKS chunks of x times `gains`, as `times_vector` takes them; and sums of squares of x."""
    squares = tl.zeros((BLOCK_CHUNKS * 16,), tl.float32)
    values = vector_values(x, start, INPUTS, PAIRED, BLOCK_CHUNKS)
    if NORM:
        a0, a1, a2, a3, b0, b1, b2, b3 = values
        squares += a0 * a0 + a1 * a1 + a2 * a2 + a3 * a3 + b0 * b0 + b1 * b1 + b2 * b2 + b3 * b3
        w0, w1, w2, w3, v0, v1, v2, v3 = gains
        values = (a0 * w0, a1 * w1, a2 * w2, a3 * w3, b0 * v0, b1 * v1, b2 * v2, b3 * v3)
    return as_integers(values, GROUP, ZERO, PTX), squares


@jit
def norm_gains(
    norm_weight,
    start,
    INPUTS: tl.constexpr,
    PAIRED: tl.constexpr,
    NORM: tl.constexpr,
    WIDE_NORM: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """The norm's weights by slots, as the vector's values. WIDE_NORM: they are float32 pairs in words of 64 bits."""
    if WIDE_NORM:
        pair = start * 64 + tl.arange(0, BLOCK_CHUNKS * 64)
        words = tl.load(norm_weight + pair, mask=pair < INPUTS // 2, other=0)
        a0, a1, a2, a3 = by_slot(words.to(tl.int32).to(tl.float32, bitcast=True), BLOCK_CHUNKS)
        b0, b1, b2, b3 = by_slot((words >> 32).to(tl.int32).to(tl.float32, bitcast=True), BLOCK_CHUNKS)
        gains = (a0, a1, a2, a3, b0, b1, b2, b3)
    elif NORM:
        gains = vector_values(norm_weight, start, INPUTS, PAIRED, BLOCK_CHUNKS)
    else:
        gains = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    return gains


@jit
def as_integers(values, GROUP: tl.constexpr, ZERO: tl.constexpr, PTX: tl.constexpr):
    """Values by slots, as `times_vector` takes them."""
    a0, a1, a2, a3, b0, b1, b2, b3 = values
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
    return high_0, low_0, high_1, low_1, step, offset_0, offset_1, sum_0, sum_1


@jit
def vector_values(x, start, INPUTS: tl.constexpr, PAIRED: tl.constexpr, BLOCK_CHUNKS: tl.constexpr):
    """A vector's values by the slots of the units they are multiplied with. → a_j (h = 0), b_j (h = 1): [units]"""
    pair = start * 64 + tl.arange(0, BLOCK_CHUNKS * 64)
    if PAIRED:
        p0, p1, p2, p3 = by_slot(
            tl.load(x + pair, mask=pair < INPUTS // 2, other=0, cache_modifier=".cg"), BLOCK_CHUNKS
        )
        a0, a1, a2, a3 = low_half(p0), low_half(p1), low_half(p2), low_half(p3)
        b0, b1, b2, b3 = high_half(p0), high_half(p1), high_half(p2), high_half(p3)
    else:
        inside = pair < INPUTS // 2
        even = tl.load(x + pair * 2, mask=inside, other=0.0, cache_modifier=".cg")
        odd = tl.load(x + pair * 2 + 1, mask=inside, other=0.0, cache_modifier=".cg")
        a0, a1, a2, a3 = by_slot(even.to(tl.float32), BLOCK_CHUNKS)
        b0, b1, b2, b3 = by_slot(odd.to(tl.float32), BLOCK_CHUNKS)
    return a0, a1, a2, a3, b0, b1, b2, b3


@jit
def by_slot(pairs, BLOCK_CHUNKS: tl.constexpr):
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
    CODEBOOK: tl.constexpr,
    PTX: tl.constexpr,
):
    """Sums of weights times values, by unit. → [BLOCK_OUT, units]"""
    word, above, scale_0, scale_1 = words
    high_0, low_0, high_1, low_1, step, offset_0, offset_1, sum_0, sum_1 = vector
    high_0, low_0, high_1, low_1 = high_0[None, :], low_0[None, :], high_1[None, :], low_1[None, :]
    step, offset_0, offset_1, sum_0, sum_1 = (
        step[None, :], offset_0[None, :], offset_1[None, :], sum_0[None, :], sum_1[None, :]
    )  # fmt: skip
    if CODEBOOK:
        even, odd = codebook_bytes(word, CODEBOOK, PTX)
        product = low_half(scale_0) * (signed_code_dot(even, odd, high_0, low_0, high_1, low_1, PTX) * step)
    elif GROUP == 32:
        even, odd = _code_bytes(word, above, LOW_BITS, HIGH_BITS)
        if LOW_BITS == 8:
            dot = wide_code_dot(even, odd, high_0, low_0, high_1, low_1, PTX) * step
        else:
            dot = code_dot(even, odd, high_0, low_0, high_1, low_1, PTX) * step - offset_0
        if ZERO == _OWN_ZERO:
            product = group_scale(scale_0) * (dot - group_zero(scale_0) * sum_0)
        else:
            product = low_half(scale_0) * dot + high_half(scale_0) * sum_0
    else:
        codes_0, codes_1 = _half_code_bytes(word, above, LOW_BITS, HIGH_BITS, PTX)
        dot_0 = half_code_dot(codes_0, high_0, low_0, PTX) * step - offset_0
        dot_1 = half_code_dot(codes_1, high_1, low_1, PTX) * step - offset_1
        if ZERO >= 0:
            product = low_half(scale_0) * dot_0 + high_half(scale_0) * dot_1
        else:
            product = low_half(scale_0) * dot_0 + high_half(scale_0) * sum_0
            product += low_half(scale_1) * dot_1 + high_half(scale_1) * sum_1
    return product


@jit
def _code_bytes(low, high, LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr):
    """The codes of a unit as bytes: slots j = 0, 2 and j = 1, 3. Bytes 0 and 1 are of h = 0, bytes 2 and 3 of h = 1."""
    tl.static_assert(LOW_BITS == 8 or (LOW_BITS == 4 and HIGH_BITS < 2))
    if LOW_BITS == 8:
        even, odd = low, high
    else:
        even, odd = low & 0x0F0F0F0F, (low >> 4) & 0x0F0F0F0F
    if HIGH_BITS == 1:
        # a product with four powers of two is four copies; what they add up to elsewhere is masked
        bits = _bytes_of_words(high)
        even |= ((bits & 0x55) * 0x00410410) & 0x10101010
        odd |= ((bits & 0xAA) * 0x00208208) & 0x10101010
    return even, odd


@jit
def _half_code_bytes(low, high, LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr, PTX: tl.constexpr):
    """The codes of a unit as bytes: slots j = 0, 1 and j = 2, 3. Bytes 0 and 1 are of h = 0, bytes 2 and 3 of h = 1."""
    tl.static_assert(LOW_BITS + HIGH_BITS == 6 or (LOW_BITS == 2 and HIGH_BITS < 2))
    if LOW_BITS == 4:
        first, second = code_halves(low, low >> 4, PTX)
        both = _bit_pairs(high, PTX)
        first, second = merged_nibbles(first, both << 4, PTX), merged_nibbles(second, both, PTX)
    else:
        both = _bit_pairs(low, PTX)
        first, second = both & 0x03030303, (both >> 4) & 0x03030303
    if HIGH_BITS == 1:
        bits = _bytes_of_words(high)
        first |= ((bits & 0x33) * 0x00204204) & 0x04040404
        second |= ((bits & 0xCC) * 0x00081081) & 0x04040404
    return first, second


@jit
def _bit_pairs(words, PTX: tl.constexpr):
    """Words with two units of a plane of two bits → of each unit a word, its bytes in the order of `_half_code_bytes`:
    slots j = 0, 1 in bits 0 and 1, slots j = 2, 3 in bits 4 and 5. The other bits are 0."""
    first, second = interleaved_bytes(words & 0x33333333, (words >> 2) & 0x33333333, PTX)
    return _by_turns(first, second)


@jit
def _bytes_of_words(words):
    """Words with four units of a plane of one bit → of each unit a word, whose low byte it is."""
    return _by_turns(_by_turns(words, words >> 16), _by_turns(words >> 8, words >> 24))


@jit
def _by_turns(first, second):
    """[rows, n] twice → [rows, 2 · n]"""
    return tl.reshape(tl.join(first, second), (first.shape[0], 2 * first.shape[1]))
