"""What the daemon and a device worker say to each other: typed values, no pickle, no tensors.

Models are known by an opaque handle that the daemon picks; a handle is never used twice. Every `Load`
is answered by `Loaded` or `ModelLoadFailed`, every `Unload` by `Unloaded`, every `Sleep` by `Slept` or `SleepFailed`,
every `Wake` by `Woken` or `WakeFailed`, every `Submit` by outputs that end with a `finish` or by one
`RequestFailed`. A worker that dies answers nothing; its death is the answer.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from cortex.neuron.engine.request import EngineInfo, EngineRequest, EngineStats, LoadSpec, StepOutput
from cortex.neuron.worker.faults import FaultKind
from cortex.wire.node import DeviceKind

Activity = Literal["start", "idle", "load", "step", "unload"]
"""What the engine thread is at, `load` being whatever moves weights; each with its own limit on silence."""


class ProtocolMessage(msgspec.Struct, frozen=True, array_like=True):
    """Base of what crosses the channel."""


class MemoryReading(ProtocolMessage, frozen=True):
    """A device's memory, and this worker's part of it."""

    total_bytes: int
    free_bytes: int
    process_bytes: int
    """CUDA: what the allocator holds. CPU: what the process holds that no file backs."""


class Load(ProtocolMessage, frozen=True, tag="load"):
    handle: int
    spec: LoadSpec


class CancelLoad(ProtocolMessage, frozen=True, tag="cancel_load"):
    """Calls off a load that runs or waits; a load that is already done ignores it."""

    handle: int


class Submit(ProtocolMessage, frozen=True, tag="submit"):
    handle: int
    request: EngineRequest


class Cancel(ProtocolMessage, frozen=True, tag="cancel"):
    handle: int
    request_id: str


class Unload(ProtocolMessage, frozen=True, tag="unload"):
    """Frees the model. Requests still in it end with `RequestFailed`."""

    handle: int


class Sleep(ProtocolMessage, frozen=True, tag="sleep"):
    """Gives the model's device memory back, its weights staying in host memory. Requests still in it are ended."""

    handle: int


class Wake(ProtocolMessage, frozen=True, tag="wake"):
    """Brings a sleeping model back to answering; tells `LoadProgress` on the way."""

    handle: int


class QueryMemory(ProtocolMessage, frozen=True, tag="query_memory"):
    query: int


class Exit(ProtocolMessage, frozen=True, tag="exit"):
    """Leave now. What is loaded dies with the process."""


Command = Load | CancelLoad | Submit | Cancel | Unload | Sleep | Wake | QueryMemory | Exit


class Hello(ProtocolMessage, frozen=True, tag="hello"):
    """The first word of a worker: its channel works, its engine is being imported."""

    process_id: int


class LoadProgress(ProtocolMessage, frozen=True, tag="load_progress"):
    handle: int
    stage: str
    done_bytes: int
    total_bytes: int


class Loaded(ProtocolMessage, frozen=True, tag="loaded"):
    handle: int
    info: EngineInfo
    before: MemoryReading
    after: MemoryReading


class ModelLoadFailed(ProtocolMessage, frozen=True, tag="load_failed"):
    """Nothing of the model is left. `cancelled` when it was called off."""

    handle: int
    kind: FaultKind
    message: str
    cancelled: bool = False


class Outputs(ProtocolMessage, frozen=True, tag="outputs"):
    """Everything one step of one model produced."""

    handle: int
    outputs: tuple[StepOutput, ...]


class RequestFailed(ProtocolMessage, frozen=True, tag="request_failed"):
    """This request ended alone; the model goes on."""

    handle: int
    request_id: str
    kind: FaultKind
    message: str


class ModelBroken(ProtocolMessage, frozen=True, tag="model_broken"):
    """Its steps keep failing although the device is well: the model must be loaded anew."""

    handle: int
    message: str


class Unloaded(ProtocolMessage, frozen=True, tag="unloaded"):
    handle: int
    before: MemoryReading
    after: MemoryReading


class Slept(ProtocolMessage, frozen=True, tag="slept"):
    """The model is asleep, and holds `host_bytes` of host memory."""

    handle: int
    host_bytes: int
    before: MemoryReading
    after: MemoryReading


class SleepFailed(ProtocolMessage, frozen=True, tag="sleep_failed"):
    """The model is as awake as before."""

    handle: int
    message: str


class Woken(ProtocolMessage, frozen=True, tag="woken"):
    handle: int
    before: MemoryReading
    after: MemoryReading


class WakeFailed(ProtocolMessage, frozen=True, tag="wake_failed"):
    """The model sleeps as before; but where it was `damaged`, nothing of it is left."""

    handle: int
    kind: FaultKind
    message: str
    damaged: bool = False


class Memory(ProtocolMessage, frozen=True, tag="memory"):
    query: int
    memory: MemoryReading


class Report(ProtocolMessage, frozen=True, tag="report"):
    """The heartbeat, sent by a thread that never waits for the device.

    `progress` grows with every step, every finished job and every piece of a load: a watchdog looks at
    that number, not at the arrival of reports.
    """

    activity: Activity
    progress: int
    stats: dict[int, EngineStats]


class Faulted(ProtocolMessage, frozen=True, tag="faulted"):
    """The device context is poisoned; the worker exits after this."""

    message: str


Event = (
    Hello
    | LoadProgress
    | Loaded
    | ModelLoadFailed
    | Outputs
    | RequestFailed
    | ModelBroken
    | Unloaded
    | Slept
    | SleepFailed
    | Woken
    | WakeFailed
    | Memory
    | Report
    | Faulted
)


# Between the daemon and the process that workers are forked from; one message per packet.


class Fork(ProtocolMessage, frozen=True, tag="fork"):
    """Make a worker for this device; its channel comes with the packet, as a file descriptor."""

    worker_number: int
    """The daemon's own number for this worker; never used twice."""
    kind: DeviceKind
    index: int
    uuid: str | None


class Kill(ProtocolMessage, frozen=True, tag="kill"):
    """End that worker now. Ignored when it has ended already."""

    worker_number: int


Order = Fork | Kill


class Warm(ProtocolMessage, frozen=True, tag="warm"):
    """The engine is imported: a fork takes milliseconds from now on."""


class Forked(ProtocolMessage, frozen=True, tag="forked"):
    worker_number: int
    process_id: int


class Ended(ProtocolMessage, frozen=True, tag="ended"):
    """The worker is gone and reaped. `return_code` is negative for a signal."""

    worker_number: int
    return_code: int


PACKET_BYTES = 4096
"""Far above any message between these two."""

Notice = Warm | Forked | Ended
