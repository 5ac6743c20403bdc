"""The instructions that look up levels, run by a model of them: a machine without a GPU checks them, too."""

from __future__ import annotations

import random
import re
import struct

import pytest

from cortex.neuron.kernels.quantised import layout as layouts
from cortex.neuron.kernels.quantised.layout import Layout
from cortex.neuron.kernels.quantised.levels import levels_option, lookup_lines, select_lines, table_words
from cortex.neuron.kernels.quantised.unpack import unpack_ptx

_LINE = re.compile(r"(and|shr|lop3|prmt|mov)\.b32 (\S+?), (.+);")


def run(lines: list[str], registers: dict[str, int]) -> None:
    """Only what the lookups use: 32-bit words, and `lop3` of the one function (a & b) | c."""
    for line in lines:
        found = _LINE.fullmatch(line)
        assert found is not None, line
        operands = [registers[name] if name in registers else int(name, 0) for name in found[3].split(", ")]
        if found[1] == "prmt":
            low, high, selector = operands
            pool = struct.pack("<II", low, high)
            # A nibble with its highest bit set would spread the byte's sign.
            assert not selector & 0x8888, line
            value = int.from_bytes(bytes(pool[(selector >> at) & 7] for at in (0, 4, 8, 12)), "little")
        elif found[1] == "lop3":
            assert operands[3] == 0xEA
            value = operands[0] & operands[1] | operands[2]
        elif found[1] == "mov":
            (value,) = operands
        else:
            value = operands[0] & operands[1] if found[1] == "and" else operands[0] >> operands[1]
        registers[found[2]] = value


def some_words() -> list[int]:
    source = random.Random(0)
    return [0, 0xFFFFFFFF, 0x76543210, 0xFEDCBA98, *(source.getrandbits(32) for _ in range(200))]


@pytest.mark.parametrize("layout", [layouts.IQ4, layouts.FP4], ids=["iq4", "fp4"])
def test_lookup_gives_the_level_of_each_nibble(layout: Layout) -> None:
    table = table_words(levels_option(layout).to_bytes(16, "little"))
    for word in some_words():
        registers = {"word": word}
        run([*select_lines("word"), *lookup_lines("low", 0, table), *lookup_lines("high", 1, table)], registers)
        levels = struct.unpack("<8b", struct.pack("<II", registers["low"], registers["high"]))
        assert levels == tuple(layout.levels[(word >> 4 * nibble) & 15] for nibble in range(8))


@pytest.mark.parametrize("layout", [layouts.IQ4, layouts.FP4], ids=["iq4", "fp4"])
def test_pairs_of_numbers_are_the_levels_of_their_slots(layout: Layout) -> None:
    lines = [line.strip() for line in unpack_ptx(layout).split("\n")]
    first, last = lines.index(select_lines("$8")[0]), lines.index("prmt.b32 s0, $10, $10, 0x1010;")
    for word in some_words():
        registers = {"$8": word}
        run(lines[first:last], registers)
        for j in range(4):
            for h in range(2):
                nibble = 4 * (j % 2) + 2 * h + j // 2
                bits = (registers[f"p{j}"] >> 16 * h & 0xFFFF) << 16
                assert struct.unpack("<f", struct.pack("<I", bits))[0] == layout.levels[(word >> 4 * nibble) & 15]
