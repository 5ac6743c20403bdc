"""Devices as nodes report them, the memory that models hold in each state, and reservations."""

from __future__ import annotations

import msgspec

from cortex.wire.node.protocol import DeviceKind, ModelState, ModelStatus


class DeviceState(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A device as its node last reported it, with this gateway's additions."""

    index: int
    kind: DeviceKind
    name: str
    total_bytes: int
    free_bytes: int
    """As the device last reported."""
    foreign_bytes: int = 0
    """Memory that none of our models use: other programs, the display, the worker's own context. Measured while nothing
    loads or unloads there."""
    kept_free_bytes: int = 0
    """Bytes that the node leaves free at every load."""
    kept_free_share: float = 0.0
    """The fraction of free memory that the node leaves free in addition."""
    ceiling_bytes: int | None = None
    """The operator's ceiling on memory of models there (`memory_mb`)."""
    extra_replica_bytes: int = 0
    """The part of `free_bytes` that extra replicas hold, which are unloaded for any load."""
    kv_host_bytes: int = 0
    """Host memory of KV pages that are not on the device."""
    utilisation: float | None = None
    """0 to 1."""
    temperature_c: float | None = None
    watts: float | None = None


class MemoryReservation(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Memory reserved for a load that this gateway has decided and the node may not report yet."""

    model_id: str
    devices: tuple[int, ...]
    num_bytes: int
    device_bytes: tuple[int, ...] = ()
    """The part of `num_bytes` on each of `devices`; empty for equal parts."""
    host_bytes: int = 0
    """Additional bytes in host memory, for weights."""


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """Ceilings on memory of models, as this gateway's operator configured them (`memory_mb`)."""

    node_bytes: int | None = None
    """Over all devices of the node."""
    device_bytes: dict[int, int] = {}
    """By device index."""


ON_DEVICE = frozenset(
    {ModelState.DOWNLOADING, ModelState.LOADING, ModelState.READY, ModelState.UNLOADING, ModelState.RECOVERING}
)
"""States in which a model holds device memory or is about to."""


def sleep_frees(kind: DeviceKind) -> bool:
    """Whether a sleeping model frees the device. Not for a CPU, whose memory is the host's, where the weights stay."""
    return kind != "cpu"


def bytes_held(index: int, kind: DeviceKind, status: ModelStatus) -> int:
    """Bytes that the model holds on the device now. A download holds nothing yet."""
    if index not in status.devices:
        return 0
    if status.state is ModelState.ASLEEP and not sleep_frees(kind):
        return -(-status.host_bytes // len(status.devices))
    if status.state not in ON_DEVICE - {ModelState.DOWNLOADING}:
        return 0
    known = dict(zip(status.devices, status.device_bytes, strict=False))
    return known.get(index, (status.measured_bytes or status.estimate_bytes or 0) // len(status.devices))
