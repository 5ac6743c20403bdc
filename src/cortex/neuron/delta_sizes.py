"""The sizes of a gated delta net, which its files, its layers and its kernels share. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """Each key head serves `value_heads / key_heads` consecutive value heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The channels of the convolution: queries, keys, values."""
        return 2 * self.key_size + self.value_size
