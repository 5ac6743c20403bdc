"""The operations between ranks that the layers of a divided model need.

A model that is divided among several devices has the same layers on each, with a share of the heads, of the inner width
and of the experts. Every layer ends with one sum over all ranks; embedding and head are divided by token. Layers know
nothing else about the group: how it communicates is up to the engine.
"""

from __future__ import annotations

from typing import Final, Protocol

from torch import Tensor

from cortex.neuron.layers.configs import WHOLE, Shard

UNLIMITED_BYTES: Final = 1 << 62


class ParallelGroup(Protocol):
    """The ranks of one model. All of them make the same calls in the same order."""

    @property
    def shard(self) -> Shard:
        """This rank and the number of ranks."""

    @property
    def max_captured_bytes(self) -> int:
        """The largest part of one rank in a call that can be captured in a CUDA graph; 0: no call can be."""

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum of the ranks' tensors. May overwrite `partial`: use the result in its place."""

    def all_gather(self, part: Tensor) -> Tensor:
        """The ranks' tensors side by side: [rows, n] → [rows, ranks · n]"""

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The first rank's tensor. May overwrite `tensor`, which has the same shape on every rank."""


class SingleRank:
    """The group of a model that is on one device as a whole."""

    shard = WHOLE
    max_captured_bytes = UNLIMITED_BYTES

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial

    def all_gather(self, part: Tensor) -> Tensor:
        return part

    def broadcast(self, tensor: Tensor) -> Tensor:
        return tensor


SINGLE_RANK = SingleRank()
