"""Which devices of a node a load takes: the one rule, for placement, for its explanations, and for a load that a node
places itself. Pure.

A gateway that has placed a model names exactly as many devices as it takes, and the node only checks that they still
have room.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, Literal

import msgspec

Strategy = Literal["pack", "spread"]
"""`pack`: the fullest devices that have room. `spread`: the emptiest."""
UNPLACED: Final = "spread"
"""The strategy of a node without a gateway: it knows of no larger model for which to keep a device free."""
MOST_LAYERS: Final = 128
"""Assumed number of layers until the node has read the files."""


class Division(msgspec.Struct, frozen=True):
    """How the bytes of a model are divided among devices: in equal shares, or by layers, in proportion to memory."""

    num_bytes: int
    """0 if unknown: it then fits everywhere."""
    num_devices: int
    by_layers: bool = False
    num_layers: int = MOST_LAYERS

    @property
    def share(self) -> int:
        """The average share of a device."""
        return -(-self.num_bytes // self.num_devices)

    @property
    def least_share(self) -> int:
        """The smallest share of a device: one layer, if the model is divided by layers."""
        return -(-self.num_bytes // self.num_layers) if self.by_layers else self.share

    def shares(self, have: Mapping[int, int]) -> dict[int, int]:
        """The share of each device, by index. Layers are divided in proportion to the bytes that the devices have."""
        total = sum(have.values())
        if not self.by_layers or not total:
            return dict.fromkeys(have, self.share)
        return {index: -(-self.num_bytes * num_bytes // total) for index, num_bytes in have.items()}

    def fits(self, have: Collection[int]) -> bool:
        """Whether enough devices with these bytes have room for it."""
        roomy = sorted((num_bytes for num_bytes in have if num_bytes >= self.least_share), reverse=True)
        if len(roomy) < self.num_devices:
            return False
        return not self.by_layers or sum(roomy[: self.num_devices]) >= self.num_bytes


def choose_devices(division: Division, have: Mapping[int, int], strategy: Strategy) -> tuple[int, ...]:
    """The devices of a load in ascending order, given the bytes that it may take of each, by index; empty if too few
    have room. Layers always go to the emptiest devices."""
    if not division.fits(have.values()):
        return ()
    sign = 1 if strategy == "pack" and not division.by_layers else -1
    roomy = (index for index, num_bytes in have.items() if num_bytes >= division.least_share)
    return tuple(sorted(sorted(roomy, key=lambda index: (sign * have[index], index))[: division.num_devices]))
