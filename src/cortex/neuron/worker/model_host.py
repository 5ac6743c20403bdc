"""Where one model is loaded, as its owner in the daemon sees it: the contract of a device, a group and replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cortex.neuron.engine.request import EngineInfo, EngineRequest, EngineStats, LoadSpec, StepOutput
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.memory import Reclaimed


class LoadRejected(Exception):
    """The worker could not load or wake the model; the message is the engine's own."""

    def __init__(
        self, kind: FaultKind, message: str, *, cancelled: bool = False, has_room_elsewhere: bool | None = None
    ) -> None:
        """`cancelled`: by the daemon, or because another rank of the model failed. `has_room_elsewhere`: of a part on
        another node that cannot wake on its devices, whether it could be loaded on others there; None: it is here."""
        super().__init__(message)
        self.kind = kind
        self.cancelled = cancelled
        self.has_room_elsewhere = has_room_elsewhere


class SleepRejected(Exception):
    """The model is not asleep, or its sleep frees too little memory; the message says why. It must be unloaded."""


class Damaged(Exception):
    """The model did not survive its sleep and was closed; the worker still works."""


@dataclass(frozen=True, slots=True)
class Resident:
    """A model in a worker's memory. Callers use it as an opaque reference, and read its sizes."""

    handle: int
    info: EngineInfo
    measured_bytes: int
    """Its size while awake: the growth of the process, but never less than the engine's own count."""
    process_bytes: int
    """The part of the worker's memory that it holds now, and that an unload must free."""
    host_bytes: int = 0
    """The size of its weights in host memory while it is asleep; 0 while it is awake."""
    part_bytes: tuple[int, ...] = ()
    """`measured_bytes` by device, in order, for a model on several."""

    def device_bytes(self, num_devices: int) -> tuple[int, ...]:
        """`measured_bytes` on each of the model's devices; equal parts while a replica of it is being loaded again."""
        if len(self.part_bytes) == num_devices:
            return self.part_bytes
        return (self.measured_bytes // num_devices,) * num_devices


class ModelSink(Protocol):
    """Receives the events of one model. Called on the loop; must not raise, must not block."""

    def on_progress(self, stage: str, done_bytes: int, total_bytes: int) -> None: ...
    def on_outputs(self, outputs: tuple[StepOutput, ...]) -> None: ...
    def on_request_failed(self, request_id: str, kind: FaultKind, message: str) -> None: ...
    def on_stats(self, stats: EngineStats) -> None: ...
    def on_lost(self, reason: str) -> None: ...

    def on_ending(self, reason: str, then: Callable[[], None]) -> None:
        """A part of the model goes soon: no new requests. Calls `then` when none is left."""


class ModelHost(Protocol):
    """Where one model is loaded: the worker of a device, those of a group (`group.py`), or several of either
    (`replicas/`). See `WorkerSupervisor`."""

    @property
    def replica_devices(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each replica; extra ones, which `device_indices` does not have, come last."""

    @property
    def device_indices(self) -> tuple[int, ...]: ...

    @property
    def freed_at_s(self) -> float: ...
    async def load(self, spec: LoadSpec, sink: ModelSink) -> Resident: ...
    async def unload(self, resident: Resident) -> Reclaimed: ...
    async def sleep(self, resident: Resident) -> Resident: ...
    async def wake(self, resident: Resident) -> Resident: ...
    def submit(self, resident: Resident, request: EngineRequest) -> None: ...
    def cancel(self, resident: Resident, request_id: str) -> None: ...

    def stop_reloads(self) -> None:
        """The node shuts down: what is lost from now on is not loaded again."""


def together(parts: Sequence[Resident]) -> Resident:
    """The parts of a model as one: the facts of the first, the sizes of all."""
    info = parts[0].info
    return Resident(
        handle=parts[0].handle,
        info=replace(
            info,
            weight_bytes=sum(part.info.weight_bytes for part in parts),
            kv_bytes=sum(part.info.kv_bytes for part in parts),
            notes=tuple(dict.fromkeys(note for part in parts for note in part.info.notes)),
        ),
        measured_bytes=sum(part.measured_bytes for part in parts),
        process_bytes=sum(part.process_bytes for part in parts),
        host_bytes=sum(part.host_bytes for part in parts),
        part_bytes=tuple(size for part in parts for size in part.part_bytes or (part.measured_bytes,)),
    )
