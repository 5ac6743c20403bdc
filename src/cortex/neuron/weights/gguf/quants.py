"""Decodes quantised blocks to codes and scales, and to float32, with torch operations over many blocks, on any device.

Every format function takes blocks as uint8 `[blocks, block_bytes]` and returns their groups of 16 or 32 elements.
The letters are those of the format: d is the scale of a block, m its minimum, q the quantised elements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from cortex.neuron.weights.gguf.types import GGMLType

_LOW_NIBBLES: Final = 0x0F0F0F0F
_IQ4_LEVELS: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class Groups:
    """Elements as `scale · q + minimum`, with one scale and one minimum per group of 16 or 32 elements."""

    q: Tensor
    """[..., group] uint8"""
    scale: Tensor
    """[..., 1] float32"""
    minimum: Tensor
    """[..., 1] float32"""

    def values(self) -> Tensor:
        """[..., group] float32"""
        return self.q.float().mul_(self.scale).add_(self.minimum)


@dataclass(frozen=True, slots=True)
class Quantisation:
    """One block format."""

    block_elements: int
    block_bytes: int
    groups: Callable[[Tensor], Groups]
    """Decodes blocks to groups: q is [groups, 16 or 32]."""

    def dequantise(self, blocks: Tensor) -> Tensor:
        """float32 [blocks, block_elements], bit-exact with the definition of the format."""
        return self.groups(blocks).values().view(-1, self.block_elements)


def _halves(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of each block, as float32 `[blocks, 1]`."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """`[..., n]` bytes to `[..., 2, n]`: all low nibbles, then all high ones. n must be a multiple of 4."""
    words = packed.clone(memory_format=torch.contiguous_format).view(torch.int32)
    return torch.stack((words & _LOW_NIBBLES, (words >> 4) & _LOW_NIBBLES), dim=-2).view(torch.uint8)


@lru_cache
def _shifts(device: torch.device, *shifts: int) -> Tensor:
    """Shift distances as a `[len(shifts), 1]` column, cached per device."""
    return torch.tensor(shifts, dtype=torch.uint8, device=device).unsqueeze(-1)


def _bit_pairs(packed: Tensor) -> Tensor:
    """`[..., n]` bytes to `[..., 4, n]`: bits 0–1 of all, then bits 2–3, 4–5, 6–7."""
    return (packed.unsqueeze(-2) >> _shifts(packed.device, 0, 2, 4, 6)) & 3


def _bits(packed: Tensor) -> Tensor:
    """`[..., n]` bytes to `[..., 8, n]`: bit 0 of all, then bit 1, …"""
    return (packed.unsqueeze(-2) >> _shifts(packed.device, 0, 1, 2, 3, 4, 5, 6, 7)) & 1


def _q4_0(blocks: Tensor) -> Groups:
    d = _halves(blocks, 0)
    return Groups(_nibbles(blocks[:, 2:]).view(-1, 32), d, d * -8)


def _q4_1(blocks: Tensor) -> Groups:
    return Groups(_nibbles(blocks[:, 4:]).view(-1, 32), _halves(blocks, 0), _halves(blocks, 2))


def _fifth_bits(packed: Tensor) -> Tensor:
    """Four bytes per block to 32 fifth bits, shifted to their position."""
    # Bit k of byte j belongs to element 8·j + k.
    return (_bits(packed).transpose(-1, -2).reshape(-1, 32)) << 4


def _q5_0(blocks: Tensor) -> Groups:
    q = _nibbles(blocks[:, 6:]).view(-1, 32) | _fifth_bits(blocks[:, 2:6])
    d = _halves(blocks, 0)
    return Groups(q, d, d * -16)


def _q5_1(blocks: Tensor) -> Groups:
    q = _nibbles(blocks[:, 8:]).view(-1, 32) | _fifth_bits(blocks[:, 4:8])
    return Groups(q, _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: Tensor) -> Groups:
    """The codes in the file are signed, -128 to 127. They are shifted to start at 0."""
    d = _halves(blocks, 0)
    return Groups(blocks[:, 2:] ^ 0x80, d, d * -128)


def _q2_k(blocks: Tensor) -> Groups:
    """16 runs of 16 elements, each run with a 4-bit scale and a 4-bit minimum."""
    scales, packed = blocks[:, :16], blocks[:, 16:80]
    d, m = _halves(blocks, 80), _halves(blocks, 82)
    q = _bit_pairs(packed.reshape(-1, 2, 32)).view(-1, 16)
    run_scale = d * (scales & 0x0F).float()
    run_minimum = m * (scales >> 4).float()
    return Groups(q, run_scale.view(-1, 1), run_minimum.view(-1, 1).neg_())


def _q3_k(blocks: Tensor) -> Groups:
    """16 runs of 16 elements with 6-bit signed scales. The third bits of the elements are in a separate mask."""
    mask, packed, scales = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    low = _nibbles(scales[:, :8]).view(-1, 16)
    high = _bit_pairs(scales[:, 8:]).view(-1, 16)
    run_scale = (_halves(blocks, 108) * (low | (high << 4)).float().sub_(32)).view(-1, 1)
    # Bit i of the mask belongs to the i-th run of 32; where it is not set, 4 is subtracted.
    q = _bit_pairs(packed.reshape(-1, 2, 32)).view(-1, 8, 32) | (_bits(mask) << 2)
    return Groups(q.view(-1, 16), run_scale, run_scale * -4)


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Twelve bytes to eight scales and eight minimums of 6 bits, as float32 `[blocks, 8]` each."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (third & 0x0F) | ((first >> 6) << 4)), dim=-1)
    minimums = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=-1)
    return scales.float(), minimums.float()


def _q4_k(blocks: Tensor) -> Groups:
    """8 runs of 32 elements. The low nibbles of 32 bytes form one run, the high nibbles the next."""
    scales, minimums = _six_bit_scales(blocks[:, 4:16])
    run_scale, run_minimum = _halves(blocks, 0) * scales, _halves(blocks, 2) * minimums
    q = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 32)
    return Groups(q, run_scale.view(-1, 1), run_minimum.view(-1, 1).neg_())


def _q5_k(blocks: Tensor) -> Groups:
    """Like Q4_K, with the fifth bits of run i in bit i of 32 more bytes."""
    scales, minimums = _six_bit_scales(blocks[:, 4:16])
    run_scale, run_minimum = _halves(blocks, 0) * scales, _halves(blocks, 2) * minimums
    q = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32) | (_bits(blocks[:, 16:48]) << 4)
    return Groups(q.view(-1, 32), run_scale.view(-1, 1), run_minimum.view(-1, 1).neg_())


def _q6_k(blocks: Tensor) -> Groups:
    """16 runs of 16 elements with 8-bit scales, in two halves of 128. Low 4 bits and high 2 bits are stored apart."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    high = _bit_pairs(blocks[:, 128:192].reshape(-1, 2, 32))
    run_scale = (_halves(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()).view(-1, 1)
    return Groups((low | (high << 4)).view(-1, 16), run_scale, run_scale * -32)


@lru_cache
def _iq4_levels(device: torch.device) -> Tensor:
    """The sixteen values of the codebook as 8-bit codes, offset by 128."""
    return torch.tensor(_IQ4_LEVELS, dtype=torch.int16, device=device).add_(128).to(torch.uint8)


def _iq4_nl(blocks: Tensor) -> Groups:
    q = _nibbles(blocks[:, 2:]).view(-1, 32)
    d = _halves(blocks, 0)
    return Groups(_iq4_levels(blocks.device)[q.int()], d, d * -128)


def _iq4_xs(blocks: Tensor) -> Groups:
    """8 runs of 32 elements with 6-bit signed scales: 4 bits in bytes 4–7, 2 bits in bytes 2–3."""
    low = _nibbles(blocks[:, 4:8]).transpose(-1, -2).reshape(-1, 8)
    high = _bit_pairs(blocks[:, 2:4]).transpose(-1, -2).reshape(-1, 8)
    run_scale = (_halves(blocks, 0) * (low | (high << 4)).float().sub_(32)).view(-1, 1)
    q = _nibbles(blocks[:, 8:].reshape(-1, 8, 16)).view(-1, 32)
    return Groups(_iq4_levels(blocks.device)[q.int()], run_scale, run_scale * -128)


@lru_cache
def _four_bit_floats(device: torch.device) -> Tensor:
    """Twice each four-bit floating-point value, as 8-bit codes, offset by 12."""
    return torch.tensor((12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0), dtype=torch.uint8, device=device)


def four_bit_floats(packed: Tensor, exponents: Tensor) -> Groups:
    """MXFP4. packed: four-bit floating-point values, one a byte [..., group]; exponents: of their scales [..., 1]"""
    scale = torch.exp2(exponents.float() - 128.0)
    return Groups(_four_bit_floats(packed.device)[packed.int()], scale, scale * -12)


def _mxfp4(blocks: Tensor) -> Groups:
    exponents = blocks[:, :1]
    # the exponent 255 stands for NaN, which makes the scale one that is not finite
    groups = four_bit_floats(_nibbles(blocks[:, 1:]).view(-1, 32), exponents)
    scale = torch.where(exponents == 255, torch.inf, groups.scale)
    return Groups(groups.q, scale, scale * -12)


QUANTISATIONS: Final[dict[str, Quantisation]] = {
    kind.name: Quantisation(kind.block_elements, kind.block_bytes, groups)
    for kind, groups in {
        GGMLType.Q4_0: _q4_0,
        GGMLType.Q4_1: _q4_1,
        GGMLType.Q5_0: _q5_0,
        GGMLType.Q5_1: _q5_1,
        GGMLType.Q8_0: _q8_0,
        GGMLType.Q2_K: _q2_k,
        GGMLType.Q3_K: _q3_k,
        GGMLType.Q4_K: _q4_k,
        GGMLType.Q5_K: _q5_k,
        GGMLType.Q6_K: _q6_k,
        GGMLType.IQ4_NL: _iq4_nl,
        GGMLType.IQ4_XS: _iq4_xs,
        GGMLType.MXFP4: _mxfp4,
    }.items()
}
