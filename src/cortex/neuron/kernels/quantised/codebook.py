"""Codes of four bits that are looked up in a codebook of sixteen values.

One instruction (prmt) picks four of eight bytes by the low three bits of four nibbles. So two of them look up both
halves of the table, and a third picks between the two by the nibbles' highest bit.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from cortex.neuron.kernels.jit import constant, jit, tl
from cortex.neuron.kernels.quantised.layout import Layout

LOOKUP_REGISTERS = "select0, select1, choose0, choose1, below"


def select_lines(word: str) -> list[str]:
    """PTX: what `lookup_lines` needs of the eight nibbles of a word."""
    return [
        f"and.b32 select0, {word}, 0x77777777;",
        f"shr.b32 choose0, {word}, 1;",
        "lop3.b32 choose0, choose0, 0x44444444, 0x32103210, 0xEA;",
        "shr.b32 select1, select0, 16;",
        "shr.b32 choose1, choose0, 16;",
    ]


def lookup_lines(out: str, half: int, table: Sequence[str]) -> list[str]:
    """PTX: the bytes of a table of four words for the four nibbles of a half of the word, 0 or 1 (the high one)."""
    return [
        f"prmt.b32 below, {table[0]}, {table[1]}, select{half};",
        f"prmt.b32 {out}, {table[2]}, {table[3]}, select{half};",
        f"prmt.b32 {out}, below, {out}, choose{half};",
    ]


def table_words(table: bytes) -> list[str]:
    """Sixteen bytes as the four words of a table."""
    return [f"{word:#x}" for word in struct.unpack("<4I", table)]


def codebook_option(layout: Layout) -> int:
    """The codebook as kernels take it: the bytes of one integer, the first lowest; 0 where there is none."""
    return int.from_bytes(struct.pack("<16b", *layout.codebook), "little") if layout.codebook else 0


_CODEBOOK_BYTES = constant(
    "{\n .reg .b32 "
    + LOOKUP_REGISTERS
    + ";\n "
    + "\n ".join(
        [
            *select_lines("$2"),
            *lookup_lines("$0", 0, ("$3", "$4", "$5", "$6")),
            *lookup_lines("$1", 1, ("$3", "$4", "$5", "$6")),
        ]
    )
    + "\n}\n"
)


@jit
def codebook_bytes(words, CODEBOOK: tl.constexpr, PTX: tl.constexpr):
    """The codebook values of eight nibbles as signed bytes: those of the low and of the high half of each word."""
    if PTX:
        return tl.inline_asm_elementwise(
            _CODEBOOK_BYTES, "=&r,=&r,r,r,r,r,r",
            [
                words,
                CODEBOOK & 0xFFFFFFFF,
                (CODEBOOK >> 32) & 0xFFFFFFFF,
                (CODEBOOK >> 64) & 0xFFFFFFFF,
                CODEBOOK >> 96,
            ],
            dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    return _half_bytes(words, CODEBOOK), _half_bytes(words >> 16, CODEBOOK)


@jit
def _half_bytes(words, CODEBOOK: tl.constexpr):
    total = codebook_value(words & 0xF, CODEBOOK) & 0xFF
    total |= (codebook_value((words >> 4) & 0xF, CODEBOOK) & 0xFF) << 8
    total |= (codebook_value((words >> 8) & 0xF, CODEBOOK) & 0xFF) << 16
    return total | (codebook_value((words >> 12) & 0xF, CODEBOOK) << 24)


@jit
def codebook_value(codes, CODEBOOK: tl.constexpr):
    """The codebook value of each code, under the interpreter."""
    byte = codes % 4 * 8
    first = tl.where(codes < 4, CODEBOOK & 0xFFFFFFFF, (CODEBOOK >> 32) & 0xFFFFFFFF)
    second = tl.where(codes < 12, (CODEBOOK >> 64) & 0xFFFFFFFF, CODEBOOK >> 96)
    word = tl.where(codes < 8, first, second).to(tl.int32, bitcast=True)
    return (word << (24 - byte)) >> 24
