"""Which experts of a mixture lie on the device follows their use."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cortex.neuron.kernels.matrix import ExpertMatrix
from cortex.neuron.kernels.moe.host_layers import HostExperts
from cortex.neuron.kernels.moe.host_memory import launch_host_function

EXCHANGE_BUFFER = 2
"""The number of the buffer on the device for an expert that comes."""
_HALVED_AT = 1 << 12
"""Counts of a layer are halved from this many choices per expert on: use changes."""


@dataclass(frozen=True, slots=True)
class ExchangeRule:
    """The rule for exchanging an expert in host memory with one on the device."""

    every_steps: int = 2
    """Interval of checks of a layer's counts."""
    factor: float = 1.5
    least: int = 16
    """The one in host memory must have been chosen `factor` times as often plus `least` times."""


class Exchange(NamedTuple):
    """Two experts of a layer that change places."""

    layer: HostExperts
    slot: int
    """Of the expert on the device, which goes to the spare place."""
    place: int
    """Of the expert in host memory, which becomes the spare one."""


def exchange_of(counts: Tensor, expert_on: Tensor, expert_in: Tensor, rule: ExchangeRule) -> tuple[int, int] | None:
    """The slot of the expert on the device that is used least, and the place of the one in host memory that is used
    most, if that pays. A place below 0 is the spare one. Pure."""
    on, place_counts = counts[expert_on], counts[expert_in.clamp(min=0)].where(expert_in >= 0, -1)
    slot, place = int(on.argmin()), int(place_counts.argmax())
    pays = int(place_counts[place]) > rule.factor * int(on[slot]) + rule.least
    return (slot, place) if pays else None


class Exchanges:
    """One at a time, in the background of steps. Belongs to the engine thread."""

    def __init__(
        self,
        device: torch.device,
        buffer: Callable[[HostExperts, int], tuple[ExpertMatrix, ExpertMatrix]],
    ) -> None:
        """`buffer`: memory on the device for places of a layer, by the number of the buffer."""
        self.layers: list[HostExperts] = []
        self.rule = ExchangeRule()
        self.num_done = 0
        self._device = device
        self._buffer = buffer
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pending: tuple[Exchange, torch.cuda.Event | None] | None = None
        self._num_steps = 0

    def advance(self, library: ctypes.CDLL) -> None:
        """Called between two steps: starts to copy two experts. A later call, once they are copied, gives them their
        new places in the order of the steps."""
        if self._pending is not None:
            exchange, event = self._pending
            if event is None or event.query():
                self._pending = None
                self._commit(exchange, library)
            return
        self._num_steps += 1
        every_steps = self.rule.every_steps
        if not self.layers or self._num_steps % every_steps:
            return
        layer = self.layers[self._num_steps // every_steps % len(self.layers)]
        found = exchange_of(layer.counts, layer.expert_on, layer.expert_in, self.rule)
        if int(layer.counts.sum()) > _HALVED_AT * layer.num_experts:
            layer.counts.div_(2, rounding_mode="floor")
        if found is not None:
            exchange = Exchange(layer, *found)
            self._pending = exchange, self._copied(exchange)

    def drop(self) -> None:
        """Forgets the one in progress, after its copies."""
        if self._pending is not None and self._pending[1] is not None:
            self._pending[1].synchronize()
        self._pending = None

    def _copied(self, exchange: Exchange) -> torch.cuda.Event | None:
        """Starts to copy both experts: one into a buffer on the device, the other to the spare place."""
        if self._stream is None:
            self._copy(exchange)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._copy(exchange)
            event: torch.cuda.Event = self._stream.record_event()
        return event

    def _copy(self, exchange: Exchange) -> None:
        layer, slot, place = exchange
        buffers = self._buffer(layer, EXCHANGE_BUFFER)
        for matrix, held, buffer in zip(layer.matrices, layer.held, buffers, strict=True):
            for own, part in zip(matrix.places(place, 1), buffer.tensors, strict=True):
                part.copy_(own, non_blocking=True)
            for own, part in zip(matrix.places(layer.spare, 1), held.tensors, strict=True):
                own.copy_(part[slot * len(own) : (slot + 1) * len(own)], non_blocking=True)

    def _commit(self, exchange: Exchange, library: ctypes.CDLL) -> None:
        layer, slot, place = exchange
        for held, buffer in zip(layer.held, self._buffer(layer, EXCHANGE_BUFFER), strict=True):
            for own, part in zip(held.tensors, buffer.tensors, strict=True):
                own[slot * len(part) : (slot + 1) * len(part)].copy_(part)
        swap = layer.swap(slot, place)
        if self._stream is None:
            library.swap_places(ctypes.byref(swap))
        else:
            launch_host_function(torch.cuda.current_stream(self._device), library.swap_places, swap)
        self.num_done += 1
