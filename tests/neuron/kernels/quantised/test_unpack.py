"""The instructions that unpack and look up codebooks, run by a model of them: machines without a GPU check them."""

from __future__ import annotations

import operator
import random
import re
import struct
from fractions import Fraction

import pytest

from cortex.neuron.kernels.quantised import layout as layouts
from cortex.neuron.kernels.quantised.codebook import codebook_option, lookup_lines, select_lines, table_words
from cortex.neuron.kernels.quantised.layout import Layout
from cortex.neuron.kernels.quantised.unpack import RESTORE, unpack_ptx

LAYOUTS = [layouts.Q2, layouts.Q3, layouts.Q4, layouts.Q5, layouts.Q6, layouts.Q8, layouts.IQ4, layouts.FP4]
_OPERATORS = {"and": operator.and_, "or": operator.or_, "shl": operator.lshift, "shr": operator.rshift}
_LINE = re.compile(r"(\w+)[\w.]* (\{.+?\}|\S+), (\{.+?\}|.+);")


def number(bits: int) -> float:
    """Takes the sixteen bits of a bfloat16."""
    value: float = struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    return value


def rounded(exact: Fraction) -> int:
    """The bits of the nearest bfloat16, ties to even. Only the values of a test: none is infinite."""
    if exact == 0:
        return 0
    below = struct.unpack("<I", struct.pack("<f", float(exact)))[0] >> 16
    nearest = min((below - 1, below, below + 1), key=lambda bits: (abs(Fraction(number(bits)) - exact), bits & 1))
    return int(nearest)


def multiply_add(a: int, b: int, c: int) -> int:
    halves = (((a >> at) & 0xFFFF, (b >> at) & 0xFFFF, (c >> at) & 0xFFFF) for at in (0, 16))
    low, high = (rounded(Fraction(number(x)) * Fraction(number(y)) + Fraction(number(z))) for x, y, z in halves)
    return low | high << 16


def permute(low: int, high: int, selector: int) -> int:
    assert not selector & 0x8888, "would spread the byte's sign"
    pool = struct.pack("<II", low, high)
    return int.from_bytes(bytes(pool[(selector >> at) & 7] for at in (0, 4, 8, 12)), "little")


def run(lines: list[str], registers: dict[str, int]) -> None:
    """Words of 32 bits, and `lop3` of the one function (a & b) | c."""
    for line in lines:
        found = _LINE.fullmatch(line)
        assert found is not None, line
        name, out, given = found.groups()
        operands = [registers[word] if word in registers else int(word, 0) for word in given.strip("{}").split(", ")]
        if name == "mov":
            value = operands[0] if len(operands) == 1 else operands[0] | operands[1] << 16
        elif name == "lop3":
            assert operands[3] == 0xEA
            value = operands[0] & operands[1] | operands[2]
        elif name == "fma":
            value = multiply_add(*operands)
        elif name == "sub":
            first, second = (struct.unpack("<f", struct.pack("<I", bits))[0] for bits in operands)
            value = struct.unpack("<I", struct.pack("<f", first - second))[0]
        elif name == "prmt":
            value = permute(*operands)
        else:
            value = _OPERATORS[name](*operands) & 0xFFFFFFFF
        if out.startswith("{"):
            first, second = out.strip("{}").split(", ")
            registers[first], registers[second] = value & 0xFFFF, value >> 16
        else:
            registers[out] = value


def expected(layout: Layout, slot: int, low: int, high: int, scales: tuple[int, int]) -> Fraction:
    """The weight of a slot, by the layout's description."""
    j = slot % 4
    if layout.low_bits == 8:
        code = (low, high)[j % 2] >> (j // 2 * 8 + slot // 4 * 16) & 0xFF
    elif layout.codebook:
        value = layout.codebook[low >> (j % 2 * 16 + j // 2 * 4 + slot // 4 * 8) & 15]
        return value * Fraction(number(scales[0] & 0xFFFF))
    else:
        code = low >> (layout.low_bits * slot) & ((1 << layout.low_bits) - 1)
        code |= (high >> (layout.high_bits * slot) & ((1 << layout.high_bits) - 1)) << layout.low_bits
    if layout.zero is not None:
        return (code - layout.zero) * Fraction(number(scales[0] >> (16 * (j // 2)) & 0xFFFF))
    word = scales[j // 2] if layout.scale_words == 2 else scales[0]
    return code * Fraction(number(word & 0xFFFF)) + Fraction(number(word >> 16))


def distance(layout: Layout, slot: int, low: int, high: int, scale: int) -> Fraction:
    """As `expected`, of a layout whose groups have zeros."""
    j = slot % 4
    wide = (low, high)[j % 2] >> (j // 2 * 8 + slot // 4 * 16) & 0xFF
    code = wide if layout.low_bits == 8 else low >> (4 * slot) & 15
    kept: float = struct.unpack("<f", struct.pack("<I", scale & 0xFFFFFF00))[0]
    return (code - (scale & 0xFF)) * Fraction(kept)


def scale_word(source: random.Random) -> int:
    """Two values: a scale and a minimum, or two scales. Large, small and zero."""
    low, high = (rounded(Fraction(source.choice((0.0, 1.0, -1.0)) * 2.0 ** source.uniform(-40, 17))) for _ in range(2))
    return low | high << 16


@pytest.mark.parametrize("layout", [layouts.IQ4, layouts.FP4], ids=["iq4", "fp4"])
def test_lookup_gives_the_level_of_each_nibble(layout: Layout) -> None:
    table = table_words(codebook_option(layout).to_bytes(16, "little"))
    source = random.Random(0)
    for word in [0, 0xFFFFFFFF, 0x76543210, 0xFEDCBA98, *(source.getrandbits(32) for _ in range(200))]:
        registers = {"word": word}
        run([*select_lines("word"), *lookup_lines("low", 0, table), *lookup_lines("high", 1, table)], registers)
        values = struct.unpack("<8b", struct.pack("<II", registers["low"], registers["high"]))
        assert values == tuple(layout.codebook[(word >> 4 * nibble) & 15] for nibble in range(8))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.bits}bit-{max(layout.codebook, default=0)}")
def test_unpacked_weights_are_rounded_once(layout: Layout) -> None:
    lines = [line.strip() for line in unpack_ptx(layout).split("\n") if line.endswith(";") and ".reg" not in line]
    source = random.Random(0)
    restore = Fraction(getattr(RESTORE, "value", RESTORE))
    plane_bits = 8 * layout.high_bits if layout.low_bits != 8 else 32
    for _ in range(100):
        low = source.getrandbits(32 if layout.low_bits != 2 else 16)
        high, scales = source.getrandbits(plane_bits) if plane_bits else 0, (scale_word(source), scale_word(source))
        registers = {"$8": low, "$9": high, "$10": scales[0], "$11": scales[1]}
        run(lines, registers)
        for place, slot in enumerate((0, 4, 1, 5, 2, 6, 3, 7)):
            weight = Fraction(number(registers[f"${place}"])) * restore
            exact = expected(layout, slot, low, high, scales)
            assert weight == Fraction(number(rounded(exact))), (slot, float(exact), float(weight))


@pytest.mark.parametrize("layout", [layouts.INT4, layouts.INT8], ids=["int4", "int8"])
def test_weights_with_a_zero_are_rounded_as_those_of_the_exact_scale(layout: Layout) -> None:
    lines = [line.strip() for line in unpack_ptx(layout).split("\n") if line.endswith(";") and ".reg" not in line]
    source = random.Random(0)
    restore, ties = Fraction(getattr(RESTORE, "value", RESTORE)), 0
    for _ in range(100):
        kept = source.choice((1.0, -1.0)) * 2.0 ** source.uniform(-24, 17)
        scale = struct.unpack("<I", struct.pack("<f", kept))[0] & 0xFFFFFF00 | source.randrange(1 << layout.bits)
        low, high = source.getrandbits(32), source.getrandbits(32)
        registers = {"$8": low, "$9": high, "$10": scale, "$11": scale}
        run(lines, registers)
        for place, slot in enumerate((0, 4, 1, 5, 2, 6, 3, 7)):
            weight, exact = Fraction(number(registers[f"${place}"])) * restore, distance(layout, slot, low, high, scale)
            assert abs(weight - exact) <= abs(exact) * Fraction(259, 1 << 16), (slot, float(exact), float(weight))
            ties += weight != Fraction(number(rounded(exact)))
    assert ties < 20  # of 800: where the exact weight is almost between two
