"""Every quantisation against a scalar reading of its definition, bit for bit, on random blocks."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch

from cortex.neuron.weights.gguf.quants import QUANTISATIONS

IQ4 = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
F = np.float32


def half(block: bytes, at: int) -> F:
    return F(struct.unpack_from("<e", block, at)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def q4_0(block: bytes) -> list[F]:
    d, qs = half(block, 0), block[2:]
    return [F((qs[i % 16] >> (4 * (i // 16)) & 15) - 8) * d for i in range(32)]


def q4_1(block: bytes) -> list[F]:
    d, m, qs = half(block, 0), half(block, 2), block[4:]
    return [F(qs[i % 16] >> (4 * (i // 16)) & 15) * d + m for i in range(32)]


def q5_number(i: int, qs: bytes, qh: int) -> int:
    return (qs[i % 16] >> (4 * (i // 16)) & 15) | (qh >> i & 1) << 4


def q5_0(block: bytes) -> list[F]:
    d, qh = half(block, 0), int.from_bytes(block[2:6], "little")
    return [F(q5_number(i, block[6:], qh) - 16) * d for i in range(32)]


def q5_1(block: bytes) -> list[F]:
    d, m, qh = half(block, 0), half(block, 2), int.from_bytes(block[4:8], "little")
    return [F(q5_number(i, block[8:], qh)) * d + m for i in range(32)]


def q8_0(block: bytes) -> list[F]:
    return [F(signed(byte)) * half(block, 0) for byte in block[2:]]


def two_bits(i: int, qs: bytes) -> int:
    """Number i of 256: halves of 128, in each four layers of 32 at bits 0, 2, 4, 6."""
    return qs[32 * (i // 128) + i % 32] >> (2 * (i % 128 // 32)) & 3


def q2_k(block: bytes) -> list[F]:
    scales, qs, d, m = block[:16], block[16:80], half(block, 80), half(block, 82)
    return [d * F(scales[i // 16] & 15) * F(two_bits(i, qs)) - m * F(scales[i // 16] >> 4) for i in range(256)]


def q3_k(block: bytes) -> list[F]:
    mask, qs, packed, d = block[:32], block[32:96], block[96:108], half(block, 108)

    def scale(run: int) -> int:
        low = packed[run % 8] >> (4 * (run // 8)) & 15
        return (low | (packed[8 + run % 4] >> (2 * (run // 4)) & 3) << 4) - 32

    return [
        d * F(scale(i // 16)) * F(two_bits(i, qs) - (0 if mask[i % 32] >> (i // 32) & 1 else 4)) for i in range(256)
    ]


def scale_and_minimum(run: int, packed: bytes) -> tuple[int, int]:
    if run < 4:
        return packed[run] & 63, packed[run + 4] & 63
    scale = packed[run + 4] & 15 | (packed[run - 4] >> 6) << 4
    return scale, packed[run + 4] >> 4 | (packed[run] >> 6) << 4


def q4_k(block: bytes) -> list[F]:
    d, m, packed, qs = half(block, 0), half(block, 2), block[4:16], block[16:]
    numbers = []
    for i in range(256):
        scale, minimum = scale_and_minimum(i // 32, packed)
        q = qs[32 * (i // 64) + i % 32] >> (4 * (i % 64 // 32)) & 15
        numbers.append(d * F(scale) * F(q) - m * F(minimum))
    return numbers


def q5_k(block: bytes) -> list[F]:
    d, m, packed, qh, qs = half(block, 0), half(block, 2), block[4:16], block[16:48], block[48:]
    numbers = []
    for i in range(256):
        scale, minimum = scale_and_minimum(i // 32, packed)
        q = qs[32 * (i // 64) + i % 32] >> (4 * (i % 64 // 32)) & 15
        q += 16 * (qh[i % 32] >> (i // 32) & 1)
        numbers.append(d * F(scale) * F(q) - m * F(minimum))
    return numbers


def q6_k(block: bytes) -> list[F]:
    ql, qh, scales, d = block[:128], block[128:192], block[192:208], half(block, 208)
    numbers = []
    for i in range(256):
        section, within = divmod(i, 128)
        low = ql[64 * section + within % 64] >> (4 * (within // 64)) & 15
        high = qh[32 * section + within % 32] >> (2 * (within // 32)) & 3
        numbers.append(d * F(signed(scales[i // 16])) * F((low | high << 4) - 32))
    return numbers


def iq4_nl(block: bytes) -> list[F]:
    d, qs = half(block, 0), block[2:]
    return [F(IQ4[qs[i % 16] >> (4 * (i // 16)) & 15]) * d for i in range(32)]


def iq4_xs(block: bytes) -> list[F]:
    d, high, low, qs = half(block, 0), int.from_bytes(block[2:4], "little"), block[4:8], block[8:]
    numbers = []
    for i in range(256):
        run, within = divmod(i, 32)
        scale = (low[run // 2] >> (4 * (run % 2)) & 15 | (high >> (2 * run) & 3) << 4) - 32
        numbers.append(d * F(scale) * F(IQ4[qs[16 * run + within % 16] >> (4 * (within // 16)) & 15]))
    return numbers


# Byte positions of the float16 scales, which the random blocks below must keep finite.
REFERENCES: dict[str, tuple[Callable[[bytes], list[F]], tuple[int, ...]]] = {
    "Q4_0": (q4_0, (0,)),
    "Q4_1": (q4_1, (0, 2)),
    "Q5_0": (q5_0, (0,)),
    "Q5_1": (q5_1, (0, 2)),
    "Q8_0": (q8_0, (0,)),
    "Q2_K": (q2_k, (80, 82)),
    "Q3_K": (q3_k, (108,)),
    "Q4_K": (q4_k, (0, 2)),
    "Q5_K": (q5_k, (0, 2)),
    "Q6_K": (q6_k, (208,)),
    "IQ4_NL": (iq4_nl, (0,)),
    "IQ4_XS": (iq4_xs, (0,)),
}


def test_every_quantisation_has_a_reference() -> None:
    assert set(REFERENCES) == set(QUANTISATIONS)


@pytest.mark.parametrize("name", REFERENCES)
def test_blocks_become_the_numbers_the_format_defines(name: str) -> None:
    quantisation = QUANTISATIONS[name]
    reference, scales_at = REFERENCES[name]
    random = np.random.default_rng(7)
    blocks = random.integers(0, 256, (40, quantisation.block_bytes), dtype=np.uint8)
    for at in scales_at:
        blocks[:, at : at + 2] = random.normal(0, 0.1, 40).astype(np.float16).view(np.uint8).reshape(40, 2)

    numbers = quantisation.dequantise(torch.from_numpy(blocks))

    assert numbers.dtype == torch.float32
    expected = np.array([reference(block.tobytes()) for block in blocks], dtype=np.float32)
    np.testing.assert_array_equal(numbers.numpy(), expected)


@pytest.mark.parametrize("name", REFERENCES)
def test_no_blocks_are_no_numbers(name: str) -> None:
    quantisation = QUANTISATIONS[name]
    empty = torch.empty(0, quantisation.block_bytes, dtype=torch.uint8)
    assert quantisation.dequantise(empty).shape == (0, quantisation.block_elements)
