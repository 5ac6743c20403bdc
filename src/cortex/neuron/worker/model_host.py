"""The interface of a host: one model in the memory of one or more devices, as seen by its owner in the daemon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cortex.neuron.engine.request import EngineInfo, EngineRequest, EngineStats, StepOutput
from cortex.neuron.engine.roofline.step_work import StepWork
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.memory import Reclaimed


class LoadRejected(Exception):
    """The model could not be loaded or woken; the message is the engine's own."""

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
    """The model is not asleep, or its sleep freed too little memory; the message says why. It must be unloaded."""


class Damaged(Exception):
    """The model did not survive its sleep and was unloaded; its workers still work."""


@dataclass(frozen=True, slots=True)
class Resident:
    """A model's facts and sizes, as of its load, or of its latest sleep or wake."""

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

    @classmethod
    def together(cls, parts: Sequence[Resident]) -> Resident:
        """The parts of a model as one: the facts of the first, the sizes of all."""
        info = parts[0].info
        works = [part.info.work for part in parts if part.info.work is not None]
        return cls(
            info=replace(
                info,
                weight_bytes=sum(part.info.weight_bytes for part in parts),
                host_weight_bytes=sum(part.info.host_weight_bytes for part in parts),
                host_locked_bytes=sum(part.info.host_locked_bytes for part in parts),
                kv_bytes=sum(part.info.kv_bytes for part in parts),
                work=StepWork.together(works) if len(works) == len(parts) else None,
                notes=tuple(dict.fromkeys(note for part in parts for note in part.info.notes)),
            ),
            measured_bytes=sum(part.measured_bytes for part in parts),
            process_bytes=sum(part.process_bytes for part in parts),
            host_bytes=sum(part.host_bytes for part in parts),
            # A part on another node has no size here.
            part_bytes=tuple(size for part in parts for size in part.part_bytes or (part.measured_bytes,) if size),
        )


class ModelSink(Protocol):
    """Receives the events of one model, from its load on. Called on the loop; must not raise, must not block."""

    def on_progress(self, stage: str, done_bytes: int, total_bytes: int) -> None: ...
    def on_outputs(self, outputs: tuple[StepOutput, ...]) -> None: ...
    def on_request_failed(self, request_id: str, kind: FaultKind, message: str) -> None: ...
    def on_stats(self, stats: EngineStats) -> None: ...

    def on_lost(self, reason: str) -> None:
        """Nothing of the model is left. Never called before its load or after its unload has returned."""

    def on_ending(self, reason: str) -> None:
        """A member of the model's group will end soon. The owner unloads the model as soon as it is idle."""


class RelaySink:
    """Passes the events of a part on to the sink of the model; without one, drops them."""

    def __init__(self, model: ModelSink | None) -> None:
        self._relay_to = model

    def on_progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        if self._relay_to is not None:
            self._relay_to.on_progress(stage, done_bytes, total_bytes)

    def on_outputs(self, outputs: tuple[StepOutput, ...]) -> None:
        if self._relay_to is not None:
            self._relay_to.on_outputs(outputs)

    def on_request_failed(self, request_id: str, kind: FaultKind, message: str) -> None:
        if self._relay_to is not None:
            self._relay_to.on_request_failed(request_id, kind, message)

    def on_stats(self, stats: EngineStats) -> None:
        if self._relay_to is not None:
            self._relay_to.on_stats(stats)

    def on_ending(self, reason: str) -> None:
        if self._relay_to is not None:
            self._relay_to.on_ending(reason)


class ModelPart(Protocol):
    """A model, or what one device holds of it.

    Made for one load: absent, loaded, possibly asleep and awake again, then unloaded or lost, and unusable afterwards.
    Belongs to the daemon's loop.
    """

    @property
    def resident(self) -> Resident | None:
        """None while nothing is loaded."""

    @property
    def device_indices(self) -> tuple[int, ...]:
        """Its devices on this node, without those of extra replicas."""

    @property
    def freed_at_s(self) -> float:
        """When memory was last freed on its devices, on the loop's clock; readings of them may lag behind."""

    async def load(self, sink: ModelSink) -> Resident:
        """If it fails or is cancelled, nothing is left. Raises LoadRejected or WorkerLost."""

    async def sleep(self) -> Resident:
        """Moves the weights to host memory and frees the devices. Raises SleepRejected or WorkerLost."""

    async def wake(self) -> Resident:
        """Raises LoadRejected (it is asleep as before), Damaged or WorkerLost (nothing is left)."""

    async def unload(self) -> Reclaimed:
        """Frees all memory, also of a load that did not begin. Never fails."""

    def kill(self, reason: str) -> None:
        """Kills the processes that hold it, with all models in them; their sinks are notified when they have ended."""


class ModelHost(ModelPart, Protocol):
    """A whole model, or the part of it that takes its requests."""

    @property
    def replica_devices(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each replica; extra ones, which `device_indices` does not have, come last."""

    def submit(self, request: EngineRequest) -> None:
        """Sends a request to the model; its outputs, or its failure, go to the sink."""

    def cancel(self, request_id: str) -> None:
        """Cancels a request; its final output follows. Unknown ids are ignored."""

    def stop_reloads(self) -> None:
        """The node is shutting down: later losses are not faults and cause no reloads."""
