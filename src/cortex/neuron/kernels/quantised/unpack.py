"""From packed units to the operand of a tensor-core product, in registers.

A code of up to seven bits OR-ed into the mantissa of bfloat16's 128.0 is 128 + code, for two columns at a time.
Subtracting 128 is exact, and scaling rounds once. Triton has no operation for this, so it is written in PTX; under the
interpreter the same arithmetic runs in Triton's own operations. Sums and products of pairs are multiply-adds, because
cards before Hopper have no other instruction for pairs of bfloat16.
"""

from __future__ import annotations

import struct
from functools import cache

from cortex.neuron.kernels.jit import INTERPRETED, jit, tl
from cortex.neuron.kernels.quantised.layout import Layout
from cortex.neuron.kernels.quantised.levels import (
    LOOKUP_REGISTERS,
    level_of,
    levels_option,
    lookup_lines,
    select_lines,
    table_words,
)

_MAGIC = 0x43004300
"""Twice 128.0 in bfloat16."""


def bfloat16_pair(number: float) -> int:
    """The bits of a number in bfloat16, twice. The number must be exact in bfloat16."""
    bits: int = struct.unpack("<I", struct.pack("<f", number))[0]
    assert bits & 0xFFFF == 0, number
    return (bits >> 16) * 0x10001


@cache
def unpack_ptx(layout: Layout) -> str:
    """PTX that turns one unit into eight bfloat16 weights.

    Operands: $0–$7 the weights of slots 0, 4, 1, 5, 2, 6, 3, 7; $8 the low plane's word, $9 the high plane's,
    $10 and $11 the words of scales.
    """
    lines = [f"mov.b32 magic, {_MAGIC:#x};", f"mov.b32 unit, {bfloat16_pair(1.0):#x};", "mov.b32 none, 0x80008000;"]
    lines += (_levels(layout) if layout.levels else _low(layout) + _high(layout)) + _scaled(layout)
    lines += [f"mov.b32 {{${2 * j}, ${2 * j + 1}}}, p{j};" for j in range(4)]
    names = f"magic, unit, none, offset, spread, moved, high, s0, s1, m0, m1, p0, p1, p2, p3, {LOOKUP_REGISTERS}"
    return "{\n .reg .b32 " + names + ";\n " + "\n ".join(lines) + "\n}\n"


def layout_options(layout: Layout) -> dict[str, object]:
    """What kernels need to know of a layout when they are compiled."""
    return {
        "LOW_BITS": layout.low_bits,
        "HIGH_BITS": layout.high_bits,
        "GROUP": layout.group,
        "ZERO": -1 if layout.zero is None else layout.zero,
        "LEVELS": levels_option(layout),
        "SCALE_WORDS": layout.scale_words,
        "PTX": "" if INTERPRETED else unpack_ptx(layout),
    }


def _low(layout: Layout) -> list[str]:
    """p_j = two times 128 + the low bits of slots j and 4 + j."""
    if layout.low_bits == 8:
        return _bytes()
    if layout.low_bits == 4:
        source, lines, mask = "$8", [], 0x000F000F
    else:
        source, lines, mask = "spread", ["prmt.b32 spread, $8, 0, 0x4140;"], 0x00030003
    for j in range(4):
        lines.append(f"shr.b32 moved, {source}, {layout.low_bits * j};")
        lines.append(f"lop3.b32 p{j}, moved, {mask:#x}, magic, 0xEA;")
    return lines


def _bytes() -> list[str]:
    """p_j = the codes themselves: 128 + a code of eight bits would not be exact. So seven bits become 128 + them, and
    the bit above, which is the lowest of the exponent there, 256 or 128."""
    lines = [f"mov.b32 offset, {bfloat16_pair(-256.0):#x};"]
    for j in range(4):
        source = ("$8", "$9")[j % 2]
        if j >= 2:
            lines.append(f"shr.b32 moved, {source}, 8;")
            source = "moved"
        lines += [
            f"lop3.b32 p{j}, {source}, 0x007F007F, magic, 0xEA;",
            f"lop3.b32 high, {source}, 0x00800080, magic, 0xEA;",
            "fma.rn.bf16x2 high, high, unit, offset;",
            f"fma.rn.bf16x2 p{j}, p{j}, unit, high;",
        ]
    return lines


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
    """p_j = the levels: the low and the high bytes of their bfloat16 numbers have tables of their own."""
    numbers = b"".join(struct.pack("<f", level)[2:] for level in layout.levels)
    lines = select_lines("$8")
    for half in range(2):
        lines += lookup_lines("moved", half, table_words(numbers[0::2]))
        lines += lookup_lines("high", half, table_words(numbers[1::2]))
        lines += [f"prmt.b32 p{half}, moved, high, 0x6240;", f"prmt.b32 p{half + 2}, moved, high, 0x7351;"]
    return lines


def _scaled(layout: Layout) -> list[str]:
    """p_j becomes the weights: codes without their offset, scaled, plus the minimum where there is one."""
    lines = []
    if layout.low_bits != 8 and not layout.levels:
        lines.append(f"mov.b32 offset, {bfloat16_pair(-128.0 - (layout.zero or 0)):#x};")
        lines += [f"fma.rn.bf16x2 p{j}, p{j}, unit, offset;" for j in range(4)]
    low, high = "0x1010", "0x3232"
    if layout.levels:
        return [f"prmt.b32 s0, $10, $10, {low};", *(f"fma.rn.bf16x2 p{j}, p{j}, s0, none;" for j in range(4))]
    if layout.zero is not None:
        lines += [f"prmt.b32 s0, $10, $10, {low};", f"prmt.b32 s1, $10, $10, {high};"]
        return lines + [f"fma.rn.bf16x2 p{j}, p{j}, s{j // 2}, none;" for j in range(4)]
    lines += [f"prmt.b32 s0, $10, $10, {low};", f"prmt.b32 m0, $10, $10, {high};"]
    if layout.group == 32:
        return lines + [f"fma.rn.bf16x2 p{j}, p{j}, s0, m0;" for j in range(4)]
    lines += [f"prmt.b32 s1, $11, $11, {low};", f"prmt.b32 m1, $11, $11, {high};"]
    return lines + [f"fma.rn.bf16x2 p{j}, p{j}, s{j // 2}, m{j // 2};" for j in range(4)]


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
    LEVELS: tl.constexpr,
    PTX: tl.constexpr,
):
    """Int32 tensors [outputs, units] → bfloat16 weights [outputs, units, h, j0, j1]. PTX is empty when interpreted."""
    if PTX == "":
        a0, b0 = _slots(low, high, scale_0, scale_1, 0, LOW_BITS, HIGH_BITS, GROUP, ZERO, LEVELS)
        a1, b1 = _slots(low, high, scale_0, scale_1, 1, LOW_BITS, HIGH_BITS, GROUP, ZERO, LEVELS)
        a2, b2 = _slots(low, high, scale_0, scale_1, 2, LOW_BITS, HIGH_BITS, GROUP, ZERO, LEVELS)
        a3, b3 = _slots(low, high, scale_0, scale_1, 3, LOW_BITS, HIGH_BITS, GROUP, ZERO, LEVELS)
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
    LEVELS: tl.constexpr,
):
    """The weights of slots J and 4 + J."""
    low_mask: tl.constexpr = (1 << LOW_BITS) - 1
    high_mask: tl.constexpr = (1 << HIGH_BITS) - 1
    if LOW_BITS == 8:
        codes = low if J % 2 == 0 else high
        code_a = (codes >> (J // 2 * 8)) & 0xFF
        code_b = (codes >> (J // 2 * 8 + 16)) & 0xFF
    elif LEVELS:
        code_a = level_of((low >> (J % 2 * 16 + J // 2 * 4)) & 0xF, LEVELS)
        code_b = level_of((low >> (J % 2 * 16 + J // 2 * 4 + 8)) & 0xF, LEVELS)
    else:
        code_a = (low >> (LOW_BITS * J)) & low_mask
        code_b = (low >> (LOW_BITS * (J + 4))) & low_mask
    if HIGH_BITS > 0:
        code_a |= ((high >> (HIGH_BITS * J)) & high_mask) << LOW_BITS
        code_b |= ((high >> (HIGH_BITS * (J + 4))) & high_mask) << LOW_BITS
    if LEVELS:
        a = code_a.to(tl.float32) * low_half(scale_0)
        b = code_b.to(tl.float32) * low_half(scale_0)
    elif ZERO >= 0:
        scale = low_half(scale_0) if J < 2 else high_half(scale_0)
        a = (code_a - ZERO).to(tl.float32) * scale
        b = (code_b - ZERO).to(tl.float32) * scale
    else:
        words = scale_0 if GROUP == 32 or J < 2 else scale_1
        a = code_a.to(tl.float32) * low_half(words) + high_half(words)
        b = code_b.to(tl.float32) * low_half(words) + high_half(words)
    return a.to(tl.bfloat16), b.to(tl.bfloat16)


@jit
def low_half(words):
    """The bfloat16 in the low half of each word, as float32."""
    return (words << 16).to(tl.float32, bitcast=True)


@jit
def high_half(words):
    """The bfloat16 in the high half of each word, as float32."""
    return (words & -65536).to(tl.float32, bitcast=True)
