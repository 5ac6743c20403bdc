"""What a model holds of a device, by its state and the kind of the device."""

from __future__ import annotations

from cortex.wire.node.protocol import DeviceKind, ModelState, ModelStatus

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
