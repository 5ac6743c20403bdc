"""Devices as nodes report them, and how much of their memory is spoken for."""

from __future__ import annotations

import msgspec

from cortex.wire.node.protocol import DeviceKind


class DeviceState(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A device as its node last reported it, with what this gateway knows beyond that."""

    index: int
    kind: DeviceKind
    name: str
    total_bytes: int
    free_bytes: int
    """As the device last reported."""
    foreign_bytes: int = 0
    """Used by none of our models: other programs, the display, the worker's own context. Measured while nothing is
    loading or unloading there."""
    kept_free_bytes: int = 0
    """What the node leaves free at every load."""
    kept_free_share: float = 0.0
    """The fraction of the free memory that the node leaves free on top of that."""
    ceiling_bytes: int | None = None
    """The most that models may hold there, by the operator's `memory_mb`."""
    extra_replica_bytes: int = 0
    """The part of `free_bytes` that extra replicas hold, which give way to every load."""
    kv_host_bytes: int = 0
    """Host memory of KV pages that are not on the device."""
    utilisation: float | None = None
    """0 to 1."""
    temperature_c: float | None = None
    watts: float | None = None


class MemoryReservation(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Memory reserved for a load that this gateway has decided on and the node may not report yet."""

    model_id: str
    devices: tuple[int, ...]
    num_bytes: int
    device_bytes: tuple[int, ...] = ()
    """The part of `num_bytes` on each of `devices`; empty: equal parts."""
    host_bytes: int = 0
    """Weights that it leaves to host memory, in addition."""


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """The most memory that models may hold, as this gateway's operator configured it (`memory_mb`)."""

    node_bytes: int | None = None
    """Over all devices of the node."""
    device_bytes: dict[int, int] = {}
    """By device index."""
