"""From packed units to the operand of a tensor-core product, in registers.

The values of bfloat16 below 2⁻¹²⁵ are evenly spaced: the bits of an integer below 256 are that integer times 2⁻¹³³.
So a code needs no conversion, and one multiply-add, for two columns at a time, gives the weight, with a scale that is
as much larger. It rounds once. A code may even stay a few bits further up, with a scale that is as much smaller. What
comes out is RESTORE times too small, which is made up for once, after the product. Scales from 2¹⁸ on do not fit.

A scale of 24 bits is the sum of two of bfloat16. The distance of a code from its zero is exact in bfloat16; its
products with both are added, so that a weight is rounded as the exact one would be, but for those next to a tie.

Triton has no operation for this, so it is written in PTX; under the interpreter the same arithmetic runs in Triton's
own operations. Products of pairs are multiply-adds, because cards before Hopper have no other instruction for pairs of
bfloat16.
"""

from __future__ import annotations

import struct
from functools import cache

from cortex.neuron.kernels.jit import INTERPRETED, constant, jit, tl
from cortex.neuron.kernels.quantised.codebook import (
    LOOKUP_REGISTERS,
    codebook_option,
    codebook_value,
    lookup_lines,
    select_lines,
    table_words,
)
from cortex.neuron.kernels.quantised.layout import FP4, OWN_ZERO, Layout

_RESTORE_BITS = 23
_SCALE_BITS = 133 - _RESTORE_BITS
RESTORE = constant(2.0**_RESTORE_BITS)
_SHRINK = constant(2.0**-_RESTORE_BITS)
_OWN_ZERO = constant(OWN_ZERO)
_TO_INTEGER = constant(float(1 << 23))


def bfloat16_pair(low: float, high: float) -> int:
    """The bits of two values in bfloat16. The values must be exact in bfloat16."""
    bits: tuple[int, int] = struct.unpack("<II", struct.pack("<ff", low, high))
    assert all(half & 0xFFFF == 0 for half in bits), (low, high)
    return bits[0] >> 16 | bits[1]


@cache
def unpack_ptx(layout: Layout) -> str:
    """PTX that turns one unit into eight bfloat16 weights.

    Operands: $0–$7 the weights of slots 0, 4, 1, 5, 2, 6, 3, 7; $8 the low plane's word, $9 the high plane's,
    $10 and $11 the words of scales.
    """
    if layout.codebook == FP4.codebook:
        lines = _small_floats()
    elif layout.codebook:
        lines = _levels(layout)
    else:
        positions, lines = _codes(layout)
        lines += _scaled_distances(positions) if layout.has_zeros else _scaled(layout, positions)
    return _assembled(lines)


def layout_options(layout: Layout) -> dict[str, object]:
    """What kernels need to know of a layout when they are compiled."""
    return {
        "LOW_BITS": layout.low_bits,
        "HIGH_BITS": layout.high_bits,
        "GROUP": layout.group,
        "ZERO": layout.zero_option,
        "CODEBOOK": codebook_option(layout),
        "SCALE_WORDS": layout.scale_words,
        "PTX": "" if INTERPRETED else unpack_ptx(layout),
    }


def _codes(layout: Layout) -> tuple[list[int], list[str]]:
    """p_j = the codes of slots j and 4 + j, and how many bits further up they stay."""
    if layout.low_bits == 8:
        lines = ["shr.b32 moved, $8, 8;", "shr.b32 high, $9, 8;"]
        sources = ("$8", "$9", "moved", "high")
        return [0] * 4, lines + [f"and.b32 p{j}, {source}, 0x00FF00FF;" for j, source in enumerate(sources)]
    bits, mask = layout.low_bits, ((1 << layout.low_bits) - 1) * 0x10001
    source, lines = "$8", []
    if bits == 2:
        source, lines = "spread", ["prmt.b32 spread, $8, 0, 0x4140;"]
    positions = [0 if layout.high_bits else bits * j % 8 for j in range(4)]
    for j, position in enumerate(positions):
        shift = bits * j - position
        if shift:
            lines.append(f"shr.b32 moved, {source}, {shift};")
        lines.append(f"and.b32 p{j}, {'moved' if shift else source}, {mask << position:#x};")
    return positions, lines + _high(layout)


def _high(layout: Layout) -> list[str]:
    """The high bits into p_j."""
    if layout.high_bits == 0:
        return []
    if layout.high_bits == 2:
        lines = ["prmt.b32 spread, $9, 0, 0x4140;"]
    else:
        lines = ["shl.b32 spread, $9, 12;", "or.b32 spread, spread, $9;", "and.b32 spread, spread, 0x000F000F;"]
    mask = (((1 << layout.high_bits) - 1) << layout.low_bits) * 0x10001
    for j in range(4):
        left = layout.low_bits - layout.high_bits * j
        lines.append(f"sh{'l' if left >= 0 else 'r'}.b32 moved, spread, {abs(left)};")
        lines.append(f"lop3.b32 p{j}, moved, {mask:#x}, p{j}, 0xEA;")
    return lines


def _levels(layout: Layout) -> list[str]:
    """p_j = the weights: the low and the high bytes of the codebook in bfloat16 have tables of their own."""
    values = b"".join(struct.pack("<f", value * 2.0**-_RESTORE_BITS)[2:] for value in layout.codebook)
    lines = select_lines("$8")
    for half in range(2):
        lines += lookup_lines("moved", half, table_words(values[0::2]))
        lines += lookup_lines("high", half, table_words(values[1::2]))
        lines += [f"prmt.b32 p{half}, moved, high, 0x6240;", f"prmt.b32 p{half + 2}, moved, high, 0x7351;"]
    lines += _doubled("s0", "$10", 0)
    return lines + [f"fma.rn.bf16x2 p{j}, p{j}, s0, none;" for j in range(4)]


def _small_floats() -> list[str]:
    """p_j = the weights: a sign, two bits of exponent and one of fraction, moved to where bfloat16 has them, are the
    value of the codebook times 2⁻¹²⁷. Two thirds of the instructions of a table."""
    lines = []
    for half, selector in ((0, 0x1404), (1, 0x3424)):  # each byte becomes the upper one of a half
        lines += [
            f"prmt.b32 spread, $8, 0, {selector:#x};",
            "shl.b32 moved, spread, 4;",
            "shr.b32 high, spread, 2;",
            "and.b32 high, high, 0x01C001C0;",
            f"lop3.b32 p{half}, moved, 0x80008000, high, 0xEA;",
            "shr.b32 high, spread, 6;",
            "and.b32 high, high, 0x01C001C0;",
            f"lop3.b32 p{half + 2}, spread, 0x80008000, high, 0xEA;",
        ]
    lines += _times("s", "$10", 2.0 ** (127 - _RESTORE_BITS), 0.0) + _doubled("s0", "s", 0)
    return lines + [f"fma.rn.bf16x2 p{j}, p{j}, s0, none;" for j in range(4)]


@cache
def small_floats_by_half() -> str:
    """As `unpack_ptx` for FP4, with the weights of the same place of both halves of a word together: $0–$7 are those of
    nibbles 0, 4, 1, 5, 2, 6, 3, 7. Shifts to the left are multiplications, which other units of a processor do."""
    lines = []
    for nibble, (sign, rest) in enumerate(((12, 6), (8, 2), (4, -2), (0, -6))):
        lines.append(f"shr.b32 high, $8, {-rest};" if rest < 0 else f"mul.lo.u32 high, $8, {1 << rest};")
        lines.append("and.b32 high, high, 0x01C001C0;")
        if sign:
            lines.append(f"mul.lo.u32 moved, $8, {1 << sign};")
        lines.append(f"lop3.b32 p{nibble}, {'moved' if sign else '$8'}, 0x80008000, high, 0xEA;")
    lines += _times("s", "$10", 2.0 ** (127 - _RESTORE_BITS), 0.0) + _doubled("s0", "s", 0)
    lines += [f"fma.rn.bf16x2 p{j}, p{j}, s0, none;" for j in range(4)]
    return _assembled(lines)


def _assembled(lines: list[str]) -> str:
    """Of lines that leave the weights in p0 to p3."""
    lines = lines + [f"mov.b32 {{${2 * j}, ${2 * j + 1}}}, p{j};" for j in range(4)]
    words = ", ".join(f"{name}{j}" for name in ("p", "s", "m") for j in range(4))
    return (
        f"{{\n .reg .b32 none, spread, moved, high, s, m, {words}, {LOOKUP_REGISTERS};\n .reg .b16 first, second;\n "
        + "\n ".join(["mov.b32 none, 0x80008000;", *lines])
        + "\n}\n"
    )


def _scaled(layout: Layout, positions: list[int]) -> list[str]:
    """p_j becomes the weights: codes times their scale, plus the minimum, which is `-zero` times the scale where there
    is no other."""
    lines = []
    for j, position in enumerate(positions):
        word = "$11" if layout.scale_words == 2 and j >= 2 else "$10"
        scale, shrink = 2.0 ** (_SCALE_BITS - position), 2.0**-_RESTORE_BITS
        if layout.zero is None:
            lines += _times("s", word, scale, shrink) + _doubled(f"s{j}", "s", 0) + _doubled(f"m{j}", "s", 1)
        else:
            lines += _times("s", word, scale, scale) + _doubled(f"s{j}", "s", j // 2)
            lines += _times("m", word, -layout.zero * shrink, -layout.zero * shrink) + _doubled(f"m{j}", "m", j // 2)
        lines.append(f"fma.rn.bf16x2 p{j}, p{j}, s{j}, m{j};")
    return lines


def _scaled_distances(positions: list[int]) -> list[str]:
    """p_j becomes the weights: the distances of codes from their zero times both parts of the scale."""
    away = -(2.0**_SCALE_BITS)
    lines = [
        "prmt.b32 m, $10, 0, 0x4040;",
        f"mov.b32 s, {bfloat16_pair(away, away):#x};",
        "fma.rn.bf16x2 m, m, s, none;",
        "and.b32 high, $10, 0xFFFF0000;",
        "and.b32 moved, $10, 0xFFFFFF00;",
        "sub.rn.f32 moved, moved, high;",
        *_doubled("s0", "high", 1),
        *_doubled("s1", "moved", 1),
    ]
    for j, position in enumerate(positions):
        unit = 2.0 ** (_SCALE_BITS - position)
        lines += [
            f"mov.b32 s, {bfloat16_pair(unit, unit):#x};",
            f"fma.rn.bf16x2 p{j}, p{j}, s, m;",
            f"fma.rn.bf16x2 m{j}, p{j}, s1, none;",
            f"fma.rn.bf16x2 p{j}, p{j}, s0, m{j};",
        ]
    return lines


def _times(out: str, word: str, low: float, high: float) -> list[str]:
    """The two values of a word times two powers of two."""
    return [f"mov.b32 {out}, {bfloat16_pair(low, high):#x};", f"fma.rn.bf16x2 {out}, {word}, {out}, none;"]


def _doubled(out: str, word: str, half: int) -> list[str]:
    """A half of a word twice. It takes no instruction: those that use it can read either half twice."""
    name = ("first", "second")[half]
    return [f"mov.b32 {{first, second}}, {word};", f"mov.b32 {out}, {{{name}, {name}}};"]


@jit
def unpack_units(
    low,
    high,
    scale_0,
    scale_1,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    CODEBOOK: tl.constexpr,
    PTX: tl.constexpr,
):
    """Int32 tensors [outputs, units] → bfloat16 weights / RESTORE [outputs, units, h, j0, j1]. PTX is empty when
    interpreted."""
    if PTX == "":
        a0, b0 = _slots(low, high, scale_0, scale_1, 0, LOW_BITS, HIGH_BITS, GROUP, ZERO, CODEBOOK)
        a1, b1 = _slots(low, high, scale_0, scale_1, 1, LOW_BITS, HIGH_BITS, GROUP, ZERO, CODEBOOK)
        a2, b2 = _slots(low, high, scale_0, scale_1, 2, LOW_BITS, HIGH_BITS, GROUP, ZERO, CODEBOOK)
        a3, b3 = _slots(low, high, scale_0, scale_1, 3, LOW_BITS, HIGH_BITS, GROUP, ZERO, CODEBOOK)
    else:
        a0, b0, a1, b1, a2, b2, a3, b3 = tl.inline_asm_elementwise(
            PTX,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r",
            [low, high, scale_0, scale_1],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=1,
        )
    first = tl.join(tl.join(a0, b0), tl.join(a1, b1))
    second = tl.join(tl.join(a2, b2), tl.join(a3, b3))
    return tl.join(first, second)


@jit
def operand(
    low,
    high,
    scales,
    row,
    start,
    CHUNKS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    WARPS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    CODEBOOK: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    PTX: tl.constexpr,
):
    """Weights / RESTORE of matrix rows `row` in BLOCK_CHUNKS chunks from `start` on.
    → [BLOCK_OUT, 128 · BLOCK_CHUNKS] bfloat16

    The rows come out in another order (`operand_row`): a warp loads eight rows at a time and multiplies sixteen.
    """
    unit = tl.arange(0, BLOCK_CHUNKS * 16)
    where = row[:, None] * (CHUNKS * 16) + start * 16 + unit[None, :]
    word = tl.load(low + where).to(tl.int32)
    above = word
    if HIGH_BITS > 0 or LOW_BITS == 8:
        above = tl.load(high + where).to(tl.int32)
    group = tl.arange(0, BLOCK_CHUNKS * 4)
    scale = scales + (row[:, None] * (CHUNKS * 4) + start * 4 + group[None, :]) * SCALE_WORDS
    scale_0 = _by_unit(tl.load(scale).to(tl.int32), BLOCK_OUT, BLOCK_CHUNKS)
    scale_1 = scale_0
    if SCALE_WORDS == 2:
        scale_1 = _by_unit(tl.load(scale + 1), BLOCK_OUT, BLOCK_CHUNKS)
    weights = unpack_units(word, above, scale_0, scale_1, LOW_BITS, HIGH_BITS, GROUP, ZERO, CODEBOOK, PTX)
    repeats: tl.constexpr = BLOCK_OUT // (8 * WARPS)
    weights = tl.reshape(weights, (repeats, WARPS, 8, BLOCK_CHUNKS, 4, 4, 2, 2, 2))  # …, chunk, t, v, h, j0, j1
    weights = tl.permute(weights, (1, 0, 2, 3, 5, 8, 7, 4, 6))  # …, chunk, v, j1, j0, t, h
    return tl.reshape(weights, (BLOCK_OUT, BLOCK_CHUNKS * 128))


@jit
def _by_unit(words, BLOCK_OUT: tl.constexpr, BLOCK_CHUNKS: tl.constexpr):
    """Unit 4·t + v takes the v-th word of its chunk: [BLOCK_OUT, 4 · BLOCK_CHUNKS] → [BLOCK_OUT, 16 · BLOCK_CHUNKS]"""
    words = tl.reshape(words, (BLOCK_OUT, BLOCK_CHUNKS, 1, 4))
    return tl.reshape(tl.broadcast_to(words, (BLOCK_OUT, BLOCK_CHUNKS, 4, 4)), (BLOCK_OUT, BLOCK_CHUNKS * 16))


@jit
def operand_row(BLOCK_OUT: tl.constexpr, WARPS: tl.constexpr):
    """Which of the loaded rows each row of the operand is."""
    repeats: tl.constexpr = BLOCK_OUT // (8 * WARPS)
    loaded = tl.reshape(tl.arange(0, BLOCK_OUT), (repeats, WARPS, 8))
    return tl.reshape(tl.permute(loaded, (1, 0, 2)), (BLOCK_OUT,))


@jit
def add_product(total, weights, values):
    """total + weights · values, of an operand. The total is RESTORE times too small until `restored`."""
    if values.dtype != tl.bfloat16:  # no other type holds such small values
        weights = weights.to(tl.float32) * RESTORE
    return tl.dot(weights.to(values.dtype), values, total)


@jit
def restored(total, DTYPE: tl.constexpr):
    """What `add_product` of values of this type adds up to."""
    return total * RESTORE if tl.bfloat16 == DTYPE else total


@jit
def _slots(
    low,
    high,
    scale_0,
    scale_1,
    J: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    CODEBOOK: tl.constexpr,
):
    """The weights / RESTORE of slots J and 4 + J."""
    low_mask: tl.constexpr = (1 << LOW_BITS) - 1
    high_mask: tl.constexpr = (1 << HIGH_BITS) - 1
    if LOW_BITS == 8:
        codes = low if J % 2 == 0 else high
        code_a = (codes >> (J // 2 * 8)) & 0xFF
        code_b = (codes >> (J // 2 * 8 + 16)) & 0xFF
    elif CODEBOOK:
        code_a = codebook_value((low >> (J % 2 * 16 + J // 2 * 4)) & 0xF, CODEBOOK)
        code_b = codebook_value((low >> (J % 2 * 16 + J // 2 * 4 + 8)) & 0xF, CODEBOOK)
    else:
        code_a = (low >> (LOW_BITS * J)) & low_mask
        code_b = (low >> (LOW_BITS * (J + 4))) & low_mask
    if HIGH_BITS > 0:
        code_a |= ((high >> (HIGH_BITS * J)) & high_mask) << LOW_BITS
        code_b |= ((high >> (HIGH_BITS * (J + 4))) & high_mask) << LOW_BITS
    if CODEBOOK:
        a = code_a.to(tl.float32) * low_half(scale_0)
        b = code_b.to(tl.float32) * low_half(scale_0)
    elif ZERO == _OWN_ZERO:
        a = (code_a.to(tl.float32) - group_zero(scale_0)) * group_scale(scale_0)
        b = (code_b.to(tl.float32) - group_zero(scale_0)) * group_scale(scale_0)
    elif ZERO >= 0:
        scale = low_half(scale_0) if J < 2 else high_half(scale_0)
        a = (code_a - ZERO).to(tl.float32) * scale
        b = (code_b - ZERO).to(tl.float32) * scale
    else:
        words = scale_0 if GROUP == 32 or J < 2 else scale_1
        a = code_a.to(tl.float32) * low_half(words) + high_half(words)
        b = code_b.to(tl.float32) * low_half(words) + high_half(words)
    return (a * _SHRINK).to(tl.bfloat16), (b * _SHRINK).to(tl.bfloat16)


@jit
def group_scale(words):
    """The scale in the upper 24 bits of each word, as float32."""
    return (words & -256).to(tl.float32, bitcast=True)


@jit
def group_zero(words):
    """The zero in the low 8 bits of each word, as float32."""
    return ((words & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True) - _TO_INTEGER


@jit
def low_half(words):
    """The bfloat16 in the low half of each word, as float32."""
    return (words << 16).to(tl.float32, bitcast=True)


@jit
def high_half(words):
    """The bfloat16 in the high half of each word, as float32."""
    return (words & -65536).to(tl.float32, bitcast=True)
