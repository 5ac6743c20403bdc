"""What the daemon and a device worker say to each other: typed values, no pickle, no tensors.

Models are known by an opaque handle that the daemon picks; a handle is never used twice. Every `Load`
is answered by `Loaded` or `LoadFailed`, every `Unload` by `Unloaded`, every `Sleep` by `Slept` or `SleepFailed`,
every `Wake` by `Woken` or `WakeFailed`, every `Submit` by outputs that end with a `finish` or by one
`RequestFailed`. A worker that dies answers nothing; its death is the answer.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from cortex.neuron.device.faults import FaultKind
from cortex.neuron.engine.request import EngineInfo, EngineRequest, EngineStats, LoadSpec, StepOutput
from cortex.wire.node import DeviceKind

Activity = Literal["start", "idle", "load", "step", "unload"]
"""What the engine thread is at, `load` being whatever moves weights; each with its own limit on silence."""


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of what crosses the channel."""


class DeviceMemory(Message, frozen=True):
    """A device's memory, and this worker's part of it."""

    total_bytes: int
    free_bytes: int
    process_bytes: int
    """CUDA: what the allocator holds. CPU: what the process holds that no file backs."""


class Load(Message, frozen=True, tag="load"):
    handle: int
    spec: LoadSpec


class CancelLoad(Message, frozen=True, tag="cancel_load"):
    """Calls off a load that runs or waits; a load that is already done ignores it."""

    handle: int


class Submit(Message, frozen=True, tag="submit"):
    handle: int
    request: EngineRequest


class Cancel(Message, frozen=True, tag="cancel"):
    handle: int
    request_id: str


class Unload(Message, frozen=True, tag="unload"):
    """Frees the model. Requests still in it end with `RequestFailed`."""

    handle: int


class Sleep(Message, frozen=True, tag="sleep"):
    """Gives the model's device memory back, its weights staying in host memory. Requests still in it are ended."""

    handle: int


class Wake(Message, frozen=True, tag="wake"):
    """Brings a sleeping model back to answering; tells `LoadProgress` on the way."""

    handle: int


class QueryMemory(Message, frozen=True, tag="query_memory"):
    query: int


class Exit(Message, frozen=True, tag="exit"):
    """Leave now. What is loaded dies with the process."""


Command = Load | CancelLoad | Submit | Cancel | Unload | Sleep | Wake | QueryMemory | Exit


class Hello(Message, frozen=True, tag="hello"):
    """The first word of a worker: its channel works, its engine is being imported."""

    process_id: int


class LoadProgress(Message, frozen=True, tag="load_progress"):
    handle: int
    stage: str
    done_bytes: int
    total_bytes: int


class Loaded(Message, frozen=True, tag="loaded"):
    handle: int
    info: EngineInfo
    before: DeviceMemory
    after: DeviceMemory


class LoadFailed(Message, frozen=True, tag="load_failed"):
    """Nothing of the model is left. `cancelled` when it was called off."""

    handle: int
    kind: FaultKind
    message: str
    cancelled: bool = False


class Outputs(Message, frozen=True, tag="outputs"):
    """Everything one step of one model produced."""

    handle: int
    outputs: tuple[StepOutput, ...]


class RequestFailed(Message, frozen=True, tag="request_failed"):
    """This request ended alone; the model goes on."""

    handle: int
    request_id: str
    kind: FaultKind
    message: str


class ModelBroken(Message, frozen=True, tag="model_broken"):
    """Its steps keep failing although the device is well: the model must be loaded anew."""

    handle: int
    message: str


class Unloaded(Message, frozen=True, tag="unloaded"):
    handle: int
    before: DeviceMemory
    after: DeviceMemory


class Slept(Message, frozen=True, tag="slept"):
    """The model is asleep, and holds `host_bytes` of host memory."""

    handle: int
    host_bytes: int
    before: DeviceMemory
    after: DeviceMemory


class SleepFailed(Message, frozen=True, tag="sleep_failed"):
    """The model is as awake as before."""

    handle: int
    message: str


class Woken(Message, frozen=True, tag="woken"):
    handle: int
    before: DeviceMemory
    after: DeviceMemory


class WakeFailed(Message, frozen=True, tag="wake_failed"):
    """The model sleeps as before; but where it was `damaged`, nothing of it is left."""

    handle: int
    kind: FaultKind
    message: str
    damaged: bool = False


class Memory(Message, frozen=True, tag="memory"):
    query: int
    memory: DeviceMemory


class Report(Message, frozen=True, tag="report"):
    """The heartbeat, sent by a thread that never waits for the device.

    `progress` grows with every step, every finished job and every piece of a load: a watchdog looks at
    that number, not at the arrival of reports.
    """

    activity: Activity
    progress: int
    stats: dict[int, EngineStats]


class Faulted(Message, frozen=True, tag="faulted"):
    """The device context is poisoned; the worker exits after this."""

    message: str


Event = (
    Hello
    | LoadProgress
    | Loaded
    | LoadFailed
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


class Fork(Message, frozen=True, tag="fork"):
    """Make a worker for this device; its channel comes with the packet, as a file descriptor."""

    birth: int
    """The daemon's own number for this worker; never used twice."""
    kind: DeviceKind
    index: int
    uuid: str | None


class Kill(Message, frozen=True, tag="kill"):
    """End that worker now. Ignored when it has ended already."""

    birth: int


Order = Fork | Kill


class Warm(Message, frozen=True, tag="warm"):
    """The engine is imported: a fork takes milliseconds from now on."""


class Forked(Message, frozen=True, tag="forked"):
    birth: int
    process_id: int


class Ended(Message, frozen=True, tag="ended"):
    """The worker is gone and reaped. `return_code` is negative for a signal."""

    birth: int
    return_code: int


PACKET_BYTES = 4096
"""Far above any message between these two."""

Notice = Warm | Forked | Ended
