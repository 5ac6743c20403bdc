"""The models on a worker's device: how they are loaded, unloaded, put to sleep and woken. Runs on the engine thread.

Each progress call of a load is a safe point, at which the loaded models run for at most as long as the load did since
the previous one.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import structs

from cortex.neuron.engine.errors import (
    DamagedError,
    EngineError,
    InsufficientMemory,
    LoadCancelled,
    LoadError,
    UnsupportedError,
)
from cortex.neuron.engine.host_pages.store import ChosenBlocks
from cortex.neuron.engine.kv.pages import Digest
from cortex.neuron.engine.scheduling.step_plan import StepPlan
from cortex.neuron.worker import memory, protocol
from cortex.neuron.worker.faults import FaultKind, chain, explain, raise_device_fault
from cortex.neuron.worker.program.device_model import DeviceModel
from cortex.neuron.worker.program.step_link import FollowerLink, LeaderLink
from cortex.neuron.worker.protocol import DeviceAddress, Event

if TYPE_CHECKING:
    from cortex.neuron.engine.engine import Engine  # imports torch, which `resolve_loader` does at run time
    from cortex.neuron.engine.host_pages.device_memory import DeviceHostMemory
    from cortex.neuron.engine.host_pages.tier import HostTier

log = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 0.05
COPY_S = 0.05
"""How long running requests may wait for blocks that another node wants."""
FORGET_S = 10.0
"""How long the engine thread may wait for blocks that are being written before it deletes them."""

EngineLoader = Callable[..., "Engine"]
"""`load_engine`: (spec, device, progress, cancelled) -> engine; a rank of a divided model also gets its link."""


def resolve_loader(name: str) -> EngineLoader:
    """Imports `module:attribute`."""
    module_name, _, attributes = name.partition(":")
    target: Any = importlib.import_module(module_name)
    for attribute in attributes.split("."):
        target = getattr(target, attribute)
    loader: EngineLoader = target
    return loader


@dataclass(frozen=True, slots=True)
class EngineThread:
    """The operations of the engine thread that loads and unloads need."""

    progressed: Callable[[], None]
    """Signals that the load is alive."""
    serve_others: Callable[[], None]
    """Executes pending requests and steps the loaded models once."""
    follow_others: Callable[[], None]
    """Runs waiting steps that other workers lead."""
    follow: Callable[[int, StepPlan], None]
    """The leader of this model announced a step. Called on another thread."""
    removed: Callable[[int], None]
    """This model is about to be freed."""


class DeviceModels(dict[int, DeviceModel]):
    """The loaded and sleeping models by handle. Methods raise DeviceFault; every other failure is an event."""

    def __init__(self, device: DeviceAddress, emit: Callable[[Event], None], thread: EngineThread) -> None:
        super().__init__()
        self.load_engine: EngineLoader
        """Set before the first load."""
        self.cancelled_loads: set[int] = set()
        """Handles; other threads add to it, so that a running load notices."""
        self._device = device
        self._emit = emit
        self._thread = thread
        self._host_pages: DeviceHostMemory | None = None
        """None until a model has a budget for pages in host memory."""
        self._reported = protocol.HostPagesKept(0, {})

    def load(self, command: protocol.Load) -> None:
        handle = command.handle
        before = self.measure()
        try:
            model = self._loaded(command)
        except (LoadCancelled, LoadError) as error:
            self._load_failed(handle, _load_fault(error), str(error), error)
        except Exception as error:
            kind = raise_device_fault(error, "load")
            log.error("loading %s failed: %s", command.spec.path, explain(error), exc_info=error)
            self._load_failed(handle, kind, explain(error), error)
        else:
            self[handle] = model
            self._keep_pages(model, command.spec.kv_host_bytes)
            if self._device.kind == "cpu":  # the allocator keeps what reading the files took
                memory.give_back(self._device)
            self._emit(protocol.Loaded(handle, model.engine.info, before, self.measure()))
        finally:
            self.cancelled_loads.discard(handle)

    def _loaded(self, command: protocol.Load) -> DeviceModel:
        """Loads a model, or one rank of it with its link to the others."""
        handle, rank = command.handle, command.spec.rank
        turns, cancelled = _LoadTurns(handle, self._emit, self._thread), lambda: handle in self.cancelled_loads
        arguments = (command.spec, self._device.torch_device, turns, cancelled)
        if rank is None:
            return DeviceModel(handle, self.load_engine(*arguments), self._device, self._emit)
        link: LeaderLink | FollowerLink
        if rank.rank:
            link = FollowerLink(rank, partial(self._thread.follow, handle), self._thread.follow_others)
        else:
            link = LeaderLink(rank, self._thread.follow_others)
        try:
            engine = self.load_engine(*arguments, link)
            if isinstance(link, FollowerLink):
                self._open(link, engine)
            return DeviceModel(handle, engine, self._device, self._emit, link)
        except BaseException:
            link.close()
            raise

    def _open(self, link: FollowerLink, engine: Engine) -> None:
        try:
            link.open()
        except OSError as error:
            engine.close()
            raise LoadCancelled(f"the leader of the model ended its load: {error}") from error

    def _load_failed(self, handle: int, kind: FaultKind, message: str, error: Exception) -> None:
        self.free_memory_of(error)
        self._emit(protocol.ModelLoadFailed(handle, kind, message, cancelled=isinstance(error, LoadCancelled)))

    def unload(self, handle: int) -> None:
        before = self.measure()
        if (model := self.get(handle)) is not None:
            model.fail_all("the model was unloaded during the request; try again")
            if self._host_pages is not None:
                self._save_pages(model)
            self.close(model)
            del model
        memory.give_back(self._device)
        self.report_host_pages()
        self._emit(protocol.Unloaded(handle, before, self.measure()))

    def sleep(self, handle: int) -> None:
        """The model must be idle."""
        before = self.measure()
        model = self.get(handle)
        if model is None:
            self._emit(protocol.SleepFailed(handle, "the model is not loaded any more"))
            return
        try:
            host_bytes = model.engine.sleep()
        except Exception as error:  # noqa: BLE001 - classified: a model that cannot sleep is still awake
            raise_device_fault(error, "sleep")
            message = explain(error)
            self.free_memory_of(error)
            self._emit(protocol.SleepFailed(handle, message))
        else:
            memory.give_back(self._device)
            self.report_host_pages()
            self._emit(protocol.Slept(handle, host_bytes, before, self.measure()))

    def wake(self, handle: int) -> None:
        before = self.measure()
        model = self.get(handle)
        if model is None:
            self._emit(protocol.WakeFailed(handle, FaultKind.REQUEST, "the model is not loaded", damaged=True))
            return
        try:
            model.engine.wake(_LoadTurns(handle, self._emit, self._thread))
        except Exception as error:
            is_damaged = isinstance(error, DamagedError)
            kind = FaultKind.OUT_OF_MEMORY if isinstance(error, LoadError) else raise_device_fault(error, "wake")
            message = str(error) if isinstance(error, EngineError) else explain(error)
            log.error("waking model %d failed: %s", handle, message, exc_info=error)
            if is_damaged:
                self.close(model)
            self.free_memory_of(error)
            self._emit(protocol.WakeFailed(handle, kind, message, is_damaged))
        else:
            model.is_prepared = False
            self._emit(protocol.Woken(handle, before, self.measure()))

    def close(self, model: DeviceModel) -> None:
        """Frees everything that the model holds."""
        self.pop(model.handle, None)
        self._thread.removed(model.handle)
        try:
            model.close()
        except Exception as error:
            raise_device_fault(error, "close")
            log.error("closing model %d failed: %s", model.handle, explain(error), exc_info=error)

    def measure(self) -> protocol.MemoryReading:
        """The memory of the device. On a CPU, pages that outlive their model are also in this process, and do not count
        as held by models."""
        reading = memory.measure(self._device)
        if self._device.kind != "cpu" or not self.kv_host_bytes:
            return reading
        return structs.replace(reading, process_bytes=max(0, reading.process_bytes - self.kv_host_bytes))

    def measure_limits(self, query: int) -> protocol.LimitsMeasured:
        """The device's rates; zeros if there is no memory for a measurement."""
        import torch  # the fork server has imported it with the engine

        from cortex.neuron.engine.memory.device_limits import measure_limits

        try:
            limits = measure_limits(torch.device(self._device.torch_device), self.measure().free_bytes)
        except (RuntimeError, MemoryError) as error:
            raise_device_fault(error, "measure the device")
            log.warning("the device's limits cannot be measured: %s", explain(error))
            limits = None
        if limits is None:
            return protocol.LimitsMeasured(query, 0.0, 0.0)
        return protocol.LimitsMeasured(query, *astuple(limits))

    # -- pages in host memory --------------------------------------------------------------------------------------

    @property
    def kv_host_bytes(self) -> int:
        return 0 if self._host_pages is None else self._host_pages.store.num_bytes

    def report_host_pages(self) -> None:
        """Reports the pages in host memory, if they have changed."""
        if self._host_pages is None:
            return
        kept = protocol.HostPagesKept(self.kv_host_bytes, self._host_pages.kept())
        if kept != self._reported:
            self._reported = kept
            self._emit(kept)

    def limit_host_pages(self, num_bytes: int) -> None:
        """Limits pages in host memory to `num_bytes`."""
        if self._host_pages is not None:
            self._host_pages.store.limit(num_bytes)

    def yield_host_memory(self) -> None:
        """Drops pages if the host runs short of memory."""
        if self._host_pages is not None:
            self._host_pages.yield_to_host()

    def _keep_pages(self, model: DeviceModel, budget_bytes: int) -> None:
        """Enables pages in host memory for the model, shared with other models."""
        self._host_pages = model.engine.keep_pages(self._host_pages)  # without a budget too, which may grow
        self.limit_host_pages(budget_bytes)

    def find_blocks(self, model: bytes, files: Sequence[str]) -> None:
        """See `FindBlocks`."""
        if self._host_pages is None or self._host_pages.disk is None:
            return
        if not files:
            self._host_pages.disk.find_again(model)
        for name in files:
            self._host_pages.disk.find_file(model, name)

    def expect_blocks(self, transfer: str, *, has_ended: bool) -> None:
        """See `ExpectBlocks`."""
        if self._host_pages is not None and self._host_pages.disk is not None:
            transfers = self._host_pages.disk.transfers
            (transfers.discard if has_ended else transfers.add)(transfer)

    def save_blocks(self, model: bytes, digests: Sequence[Digest]) -> bool:
        """Writes these blocks to disk, also from the device. False if some are left or still being written."""
        if self._host_pages is None or self._host_pages.disk is None:
            return True
        until_s = time.monotonic() + COPY_S
        is_copied = all(tier.copy_these(digests, until_s) for tier in self._tiers_of(model))
        return self._host_pages.save_these(model, digests) and is_copied

    def count_pages(self, model: bytes, digests: Sequence[Digest]) -> int:
        """The number of leading pages of a prompt that need not be computed."""
        return max((tier.num_pages(digests) for tier in self._tiers_of(model)), default=0)

    def _tiers_of(self, model: bytes) -> list[HostTier]:
        engines = (each.engine for each in self.values() if each.engine.info.kv_name == model.hex())
        return [engine.tier for engine in engines if engine.tier is not None]

    def forget_blocks(self, chosen: ChosenBlocks) -> None:
        """Forgets pages of loaded models, and of those that have left."""
        for model in self.values():
            if chosen.of_model(model.engine.model_id):
                model.engine.forget_pages(chosen.has)
        if self._host_pages is not None:
            self._host_pages.forget(chosen, time.monotonic() + FORGET_S)
        self.report_host_pages()

    def save_all(self, save_s: float) -> None:
        """Writes the pages of all models to disk, if configured, within `save_s`, before the process exits."""
        if self._host_pages is None or self._host_pages.disk is None or save_s <= 0:
            return
        until_s = time.monotonic() + save_s
        for model in list(self.values()):
            model.cancel_all()
            while model.engine.has_work and model.step():
                pass  # the KV of requests that ran is kept, too
            while self._save_pages(model, to_disk=True) and self._host_pages.settle(until_s):
                pass  # host memory has room for the next ones
        self._host_pages.settle(until_s)

    def _save_pages(self, model: DeviceModel, *, to_disk: bool = False) -> bool:
        try:
            return model.engine.save_pages(to_disk=to_disk)
        except Exception as error:
            raise_device_fault(error, "unload")
            log.error("the pages of model %d were not kept: %s", model.handle, explain(error), exc_info=error)
            return False

    def free_memory_of(self, error: Exception) -> None:
        """Frees memory held by a failure, whose traceback keeps half-loaded weights alive."""
        for link in chain(error):
            link.__traceback__ = None
        memory.give_back(self._device)


def _load_fault(error: LoadError | LoadCancelled) -> FaultKind:
    if isinstance(error, UnsupportedError):
        return FaultKind.UNSUPPORTED
    return FaultKind.OUT_OF_MEMORY if isinstance(error, InsufficientMemory) else FaultKind.REQUEST


class _LoadTurns:
    """The progress callback of one load: reports to the daemon, and lets the loaded models serve."""

    def __init__(self, handle: int, emit: Callable[[Event], None], thread: EngineThread) -> None:
        self._handle = handle
        self._emit = emit
        self._thread = thread
        self._stage: str | None = None
        self._reported_at_s = 0.0
        self._resumed_at_s = time.monotonic()
        self._served_s = 0.0

    def __call__(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        now_s = time.monotonic()
        is_due = now_s - self._reported_at_s >= PROGRESS_INTERVAL_S
        self._thread.progressed()
        if stage != self._stage or 0 < total_bytes <= done_bytes or is_due:
            self._stage, self._reported_at_s = stage, now_s
            self._emit(protocol.LoadProgress(self._handle, stage, done_bytes, total_bytes))
        if now_s - self._resumed_at_s >= self._served_s:
            self._thread.serve_others()
            self._resumed_at_s = time.monotonic()
            self._served_s = self._resumed_at_s - now_s
