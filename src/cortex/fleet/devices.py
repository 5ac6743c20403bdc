"""Devices as nodes report them, what models hold of them by their state, and how much of their memory is spoken for."""

from __future__ import annotations

import msgspec

from cortex.wire.node.protocol import DeviceKind, ModelState, ModelStatus


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


ON_DEVICE = frozenset(
    {ModelState.DOWNLOADING, ModelState.LOADING, ModelState.READY, ModelState.UNLOADING, ModelState.RECOVERING}
)
"""States in which a model holds device memory or is about to."""


def sleep_frees(kind: DeviceKind) -> bool:
    """Whether a model that falls asleep frees the device. The memory of a CPU is the host's, where its weights stay."""
    return kind != "cpu"


def bytes_held(index: int, kind: DeviceKind, status: ModelStatus) -> int:
    """What the model holds on the device now. A download holds nothing yet."""
    if index not in status.devices:
        return 0
    if status.state is ModelState.ASLEEP and not sleep_frees(kind):
        return -(-status.host_bytes // len(status.devices))
    if status.state not in ON_DEVICE - {ModelState.DOWNLOADING}:
        return 0
    known = dict(zip(status.devices, status.device_bytes, strict=False))
    return known.get(index, (status.measured_bytes or status.estimate_bytes or 0) // len(status.devices))
