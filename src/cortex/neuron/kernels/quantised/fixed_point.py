"""Dot products of codes with a vector, in integers.

One instruction multiplies four bytes with four bytes and adds the products. So the eight values that are multiplied
with a unit of codes become integers of fifteen bits times a power of two of their own, cut into a high and a low byte.
That is finer than bfloat16, whose values have eight bits, and the sums are exact. No code has to be converted to
floating point: unpacking is what is left, and a matrix is read as fast as memory delivers it.

Integers become floating-point values without a conversion: added to the bits of EXACT, an integer of 23 bits is the
mantissa of EXACT plus that integer.
"""

from __future__ import annotations

from cortex.neuron.kernels.jit import constant, jit, tl

EXACT = constant(12582912.0)
"""1.5 · 2²³, 0x4B400000"""
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
