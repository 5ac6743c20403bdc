"""The messages between the daemon and device workers: typed values, no pickle, no tensors.

The daemon gives each model a handle, which it never reuses. The reply to `Load` is `Loaded` or `ModelLoadFailed`, to
`Unload` it is `Unloaded`, to `Sleep` it is `Slept` or `SleepFailed`, to `Wake` it is `Woken` or `WakeFailed`, and to
`Submit` it is outputs that end with a `finish`, or one `RequestFailed`. The reply to a query has
its number. A worker that dies sends no reply.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import Literal

from cortex.ipc.channel import ChannelMessage, Unsendable
from cortex.neuron.engine.request import EngineInfo, EngineRequest, EngineStats, KeptPages, LoadSpec, StepOutput
from cortex.neuron.engine.scheduling.step_plan import StepPlan
from cortex.neuron.worker.faults import FaultKind
from cortex.wire.node.protocol import Device, DeviceKind

Activity = Literal["start", "idle", "load", "step", "unload"]
"""Activities of the engine thread, each with its own timeout; `load` is everything that moves weights."""


@dataclass(frozen=True, slots=True)
class DeviceAddress:
    """The device of one worker, under the name that each process needs."""

    kind: DeviceKind
    index: int
    uuid: str | None = None
    num_host_shares: int = 1
    """How many CPU devices share the host's cores and memory with this one, itself included."""
    boosts: bool = True
    """Whether the driver keeps a GPU at a high clock while the worker's context exists, idle or not."""

    @classmethod
    def of(cls, device: Device, num_host_shares: int = 1, *, boosts: bool = True) -> DeviceAddress:
        return cls(device.kind, device.index, device.uuid, num_host_shares, boosts)

    @property
    def thread_name(self) -> str:
        """The name of the engine thread that owns this device."""
        if self.kind == "cpu":
            return "cpu" if self.num_host_shares == 1 else f"cpu-dev-{self.index}"
        return f"cuda-dev-{self.index}"

    @property
    def torch_device(self) -> str:
        """The device's name in the worker's torch: a worker sees only its own GPU."""
        return "cpu" if self.kind == "cpu" else "cuda:0"

    def environment(self) -> dict[str, str]:
        """Environment variables of the worker, which hide every other device from its context."""
        if self.kind == "cpu":
            return {"CUDA_VISIBLE_DEVICES": ""}
        clock = {} if self.boosts else {"CUDA_DISABLE_PERF_BOOST": "1"}
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": self.uuid or str(self.index), **clock}


class MemoryReading(ChannelMessage, frozen=True):
    """A device's memory, and the part of it that this worker holds."""

    total_bytes: int
    free_bytes: int
    process_bytes: int
    """CUDA: the bytes that the allocator reserved. CPU: the process's anonymous memory."""


class Load(ChannelMessage, frozen=True):
    handle: int
    spec: LoadSpec


class CancelLoad(ChannelMessage, frozen=True):
    """Cancels a running or queued load; ignored when the load has ended."""

    handle: int


class Submit(ChannelMessage, frozen=True):
    handle: int
    request: EngineRequest
    """Without its prompt."""
    prompt: bytes
    """Token ids as packed 32-bit integers, which are read in half the time of a list."""

    @classmethod
    def of(cls, handle: int, request: EngineRequest) -> Submit:
        """Raises Unsendable."""
        try:
            prompt = array("I", request.prompt)
        except (OverflowError, TypeError) as error:
            raise Unsendable(f"a token id of the prompt is invalid: {error}") from error
        return cls(handle, replace(request, prompt=()), prompt.tobytes())

    def whole(self) -> EngineRequest:
        prompt = array("I")
        prompt.frombytes(self.prompt)
        return replace(self.request, prompt=prompt)


class Cancel(ChannelMessage, frozen=True):
    handle: int
    request_id: str


class Unload(ChannelMessage, frozen=True):
    """Frees the model. Requests still in it end with `RequestFailed`."""

    handle: int


class Sleep(ChannelMessage, frozen=True):
    """Frees the model's device memory and keeps its weights in host memory. Requests still in it are cancelled."""

    handle: int


class Wake(ChannelMessage, frozen=True):
    """Makes a sleeping model serve again; `LoadProgress` is reported meanwhile."""

    handle: int


class LimitHostPages(ChannelMessage, frozen=True):
    """The host memory that pages may use from now on; excess pages are dropped."""

    num_bytes: int


class FindBlocks(ChannelMessage, frozen=True):
    """The daemon has written KV blocks of a model to disk, which requests from now on may use."""

    model: bytes
    files: tuple[str, ...] = ()
    """The names of the new files; empty: they are not known, and the whole folder is read."""


class ExpectBlocks(ChannelMessage, frozen=True):
    """KV blocks of the prompts with this `EngineRequest.transfer` arrive on disk from now on, or no longer."""

    transfer: str
    has_ended: bool = False


class SaveBlocks(ChannelMessage, frozen=True):
    """Write KV blocks that another node wants to disk, between steps of the model."""

    query: int
    model: bytes
    digests: tuple[bytes, ...]


class BlocksSaved(ChannelMessage, frozen=True):
    """The reply to `SaveBlocks`."""

    query: int
    is_complete: bool
    """Whether everything possible is written; otherwise ask again."""


class CountPages(ChannelMessage, frozen=True):
    """Count the leading pages of a prompt that need not be computed."""

    query: int
    model: bytes
    digests: tuple[bytes, ...]


class PagesCounted(ChannelMessage, frozen=True):
    """The reply to `CountPages`."""

    query: int
    num_pages: int


class ForgetBlocks(ChannelMessage, frozen=True):
    """Delete KV blocks on the device, in host memory and on disk. Running requests keep theirs."""

    query: int
    model_id: str | None
    tenants: tuple[bytes, ...]
    """As of `ChosenBlocks`."""


class BlocksForgotten(ChannelMessage, frozen=True):
    """The reply to `ForgetBlocks`."""

    query: int


class QueryMemory(ChannelMessage, frozen=True):
    query: int


class MeasureLimits(ChannelMessage, frozen=True):
    """Measure the device's rates. Its models wait for about a second."""

    query: int


class Exit(ChannelMessage, frozen=True):
    """Exit now, whatever is loaded."""

    save_s: float = 0.0
    """How long KV pages may be written to disk before the exit."""


class AnnouncedStep(ChannelMessage, frozen=True):
    """From the leader of a divided model to the other ranks: run this step too."""

    plan: StepPlan


class FollowStep(ChannelMessage, frozen=True):
    """Within a worker: the leader of this model announced a step."""

    handle: int
    plan: StepPlan


class Compiled(ChannelMessage, frozen=True):
    """Within a worker: the grammar of a request was compiled, or (`problem`) cannot be."""

    handle: int
    request_id: str
    problem: str | None = None


Query = QueryMemory | MeasureLimits | SaveBlocks | CountPages | ForgetBlocks
BlocksOrder = LimitHostPages | FindBlocks | ExpectBlocks
Command = Load | CancelLoad | Submit | Cancel | Unload | Sleep | Wake | BlocksOrder | Query | Exit


class Hello(ChannelMessage, frozen=True):
    """The first event of a worker: its channel works, its engine is being imported."""

    process_id: int


class LoadProgress(ChannelMessage, frozen=True):
    handle: int
    stage: str
    done_bytes: int
    total_bytes: int


class Loaded(ChannelMessage, frozen=True):
    handle: int
    info: EngineInfo
    before: MemoryReading
    after: MemoryReading


class ModelLoadFailed(ChannelMessage, frozen=True):
    """The load failed and left nothing behind. `cancelled`: by `CancelLoad`."""

    handle: int
    kind: FaultKind
    message: str
    cancelled: bool = False


class Outputs(ChannelMessage, frozen=True):
    """All outputs of one step of one model."""

    handle: int
    outputs: tuple[StepOutput, ...]


class RequestFailed(ChannelMessage, frozen=True):
    """This request failed; the others in the model are not affected."""

    handle: int
    request_id: str
    kind: FaultKind
    message: str


class ModelBroken(ChannelMessage, frozen=True):
    """The model's steps keep failing although the device works: it was closed and must be loaded again."""

    handle: int
    message: str


class Unloaded(ChannelMessage, frozen=True):
    handle: int
    before: MemoryReading
    after: MemoryReading


class Slept(ChannelMessage, frozen=True):
    """The model is asleep and holds `host_bytes` of host memory."""

    handle: int
    host_bytes: int
    before: MemoryReading
    after: MemoryReading


class SleepFailed(ChannelMessage, frozen=True):
    """The model is still awake."""

    handle: int
    message: str


class Woken(ChannelMessage, frozen=True):
    handle: int
    before: MemoryReading
    after: MemoryReading


class WakeFailed(ChannelMessage, frozen=True):
    """The model is still asleep; if it is `damaged`, it was closed."""

    handle: int
    kind: FaultKind
    message: str
    damaged: bool = False


class Memory(ChannelMessage, frozen=True):
    query: int
    memory: MemoryReading


class LimitsMeasured(ChannelMessage, frozen=True):
    """The reply to `MeasureLimits`. Both are 0 if the device has no memory left for a measurement."""

    query: int
    bytes_per_s: float
    flops: float
    host_bytes_per_s: float = 0.0
    bus_bytes_per_s: float = 0.0


class Report(ChannelMessage, frozen=True):
    """The heartbeat, sent by a thread that never waits for the device.

    `progress` grows with every step, every executed command and every piece of a load. The watchdog compares this
    number, because a worker whose device hangs still sends reports.
    """

    activity: Activity
    progress: int
    stats: dict[int, EngineStats]


class HostPagesKept(ChannelMessage, frozen=True):
    """The pages now in host memory. Sent before `Slept` or `Unloaded` of a model."""

    num_bytes: int
    """The memory that is allocated for pages."""
    models: dict[str, KeptPages]
    """Pages by model, by `LoadSpec.model_id`."""


class FallbacksUsed(ChannelMessage, frozen=True):
    """Interfaces of torch, Triton and transformers that the worker cannot use: see `private_api`."""

    reasons: dict[str, str]
    """By the entry's name: the reason and the fallback."""


class Faulted(ChannelMessage, frozen=True):
    """The device context is unusable; the worker exits after this event."""

    message: str


Measured = Memory | LimitsMeasured | BlocksSaved | PagesCounted | BlocksForgotten
"""Replies to queries."""
Reply = Loaded | ModelLoadFailed | Unloaded | Slept | SleepFailed | Woken | WakeFailed | Measured
ModelEvent = (
    Loaded
    | ModelLoadFailed
    | Unloaded
    | Slept
    | SleepFailed
    | Woken
    | WakeFailed
    | LoadProgress
    | Outputs
    | RequestFailed
    | ModelBroken
)
"""Each concerns the model with its handle."""
Event = ModelEvent | Measured | Hello | Report | HostPagesKept | FallbacksUsed | Faulted
