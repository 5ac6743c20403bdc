"""One budget for host memory: weights of loaded models, weights of sleeping models, and KV pages that have left their
device. In this order: loaded models stay, sleeping models are unloaded for them, and pages get the rest."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from cortex.formats.units import gib
from cortex.neuron.engine.memory.host import HostMemory, read_host_memory
from cortex.neuron.engine.request import KeptPages
from cortex.neuron.worker.supervisor import WorkerSupervisor
from cortex.wire.errors import InsufficientCapacity
from cortex.wire.node.protocol import Device, HostHealth, HostKV

log = logging.getLogger(__name__)

KV_HOST_SHARE = 1 / 8
"""The share of free host memory that pages may use, unless `limits.kv_host_mb` is set."""


def device_limit_bytes(
    kv_host_mb: int | None, host: HostMemory, held: Sequence[int], rest_bytes: int | None = None
) -> int:
    """The limit of one device. `held`: bytes per device. `rest_bytes`: what weights leave of the budget that they share
    with pages; None: all of it."""
    whole = kv_host_mb << 20 if kv_host_mb is not None else int((host.free_bytes + sum(held)) * KV_HOST_SHARE)
    if rest_bytes is not None:
        whole = min(whole, rest_bytes)
    return max(0, whole) // max(1, len(held))


def kept_of_model(parts: Sequence[KeptPages], num_ranks: int) -> HostKV | None:
    """The pages of a model that a node's workers hold. The ranks of a model divided into `num_ranks` hold parts of the
    same tokens: every rank must have its part, and the slowest decides. None if nothing is usable."""
    num_bytes = sum(part.num_bytes for part in parts)
    if not any(part.num_bytes or part.num_tokens for part in parts) or len(parts) < num_ranks:
        return None
    tokens, rates = [part.num_tokens for part in parts], [part.tokens_per_s for part in parts if part.tokens_per_s]
    if num_ranks > 1:
        return HostKV(num_bytes=num_bytes, num_tokens=min(tokens), tokens_per_s=min(rates, default=None))
    return HostKV(num_bytes=num_bytes, num_tokens=sum(tokens), tokens_per_s=max(rates, default=None))


class KvHostMemory:
    """One for the node, on the daemon's loop."""

    def __init__(
        self,
        kv_host_mb: int | None,
        workers: Collection[WorkerSupervisor],
        read: Callable[[], HostMemory] = read_host_memory,
    ) -> None:
        self._kv_host_mb = kv_host_mb
        self._workers = workers
        self._read = read
        self._rest_bytes: int | None = None

    @property
    def limit_bytes(self) -> int:
        """Current limit of each device's worker."""
        held = [worker.kv_host_bytes for worker in self._workers]
        return device_limit_bytes(self._kv_host_mb, self._read(), held, self._rest_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages of all models."""
        return sum(worker.kv_host_bytes for worker in self._workers)

    def kept(self, model_id: str, num_ranks: int) -> HostKV | None:
        """The kept pages of a model that is divided among `num_ranks` devices, loaded or not; None if nothing is
        usable."""
        return kept_of_model([worker.kept[model_id] for worker in self._workers if model_id in worker.kept], num_ranks)

    def give_way(self, rest_bytes: int) -> None:
        """Weights take host memory first; pages may use `rest_bytes`."""
        self._rest_bytes = rest_bytes
        limit_bytes = self.limit_bytes
        for worker in self._workers:
            worker.limit_kv_host(limit_bytes)


SLEEP_SHARE = 0.5
"""The share of free host memory that sleeping models may use, unless `limits.sleep_mb` is set."""
LOCKED_SHARE = 0.75
"""The share of host memory that may be page-locked. The kernel can neither move nor drop locked pages."""


@dataclass(frozen=True, slots=True)
class HostModel:
    """A model with weights in host memory."""

    model_id: str
    host_bytes: int
    idle_s: float
    """Seconds since its last request ended."""
    sleeps: bool
    """Whether it is asleep, falling asleep or waking; otherwise it is loaded and computes with these weights."""
    can_be_unloaded: bool = False
    """It is asleep."""
    locked_bytes: int = 0
    """Page-locked bytes while it is loaded."""


@dataclass(frozen=True, slots=True)
class SleepPlan:
    """Whether more weights fit, and which sleeping models must be unloaded for them first."""

    fits: bool
    to_unload: tuple[str, ...] = ()


def make_room(need_bytes: int, budget_bytes: int, sleeping: Sequence[HostModel]) -> SleepPlan:
    """Picks the models that have been idle longest; none if `need_bytes` would not fit even without all of them."""
    held_bytes = sum(each.host_bytes for each in sleeping)
    to_unload: list[str] = []
    for each in _longest_idle(sleeping):
        if held_bytes + need_bytes <= budget_bytes:
            break
        to_unload.append(each.model_id)
        held_bytes -= each.host_bytes
    fits = held_bytes + need_bytes <= budget_bytes
    return SleepPlan(fits, tuple(to_unload) if fits else ())


def _longest_idle(sleeping: Sequence[HostModel]) -> list[HostModel]:
    candidates = (each for each in sleeping if each.can_be_unloaded)
    return sorted(candidates, key=lambda each: (-each.idle_s, each.model_id))


def can_sleep(sleep_mb: int | None, devices: Sequence[Device]) -> bool:
    """Whether models of this node may sleep. On a CPU sleep frees little, because weights are in host memory anyway."""
    return any(device.kind == "cuda" for device in devices) if sleep_mb is None else sleep_mb > 0


@dataclass(frozen=True, slots=True)
class HostLimits:
    """The operator's limits, and what follows from them. Pure."""

    devices: tuple[Device, ...]
    host_mb: int | None = None
    sleep_mb: int | None = None

    def budget_bytes(self, host: HostMemory, held_bytes: int) -> int:
        """Bytes of host memory that models may use, including the `held_bytes` that they hold already. The host must
        not swap, and if a GPU copies, at most `LOCKED_SHARE` may be page-locked."""
        most_bytes = max(0, host.free_bytes + held_bytes - host.reserve_bytes)
        most_bytes = min(most_bytes, self.locked_bytes(host)) if self.has_gpu else most_bytes
        return most_bytes if self.host_mb is None else min(self.host_mb << 20, most_bytes)

    @property
    def has_gpu(self) -> bool:
        """Whether host memory of models is page-locked for copies to a device."""
        return any(device.kind == "cuda" for device in self.devices)

    def locked_bytes(self, host: HostMemory) -> int:
        return int(host.total_bytes * LOCKED_SHARE)

    def sleep_bytes(self, host: HostMemory, held_bytes: int) -> int:
        """The part of it that sleeping models may use, including the `held_bytes` that they hold already."""
        if not can_sleep(self.sleep_mb, self.devices):
            return 0
        return int((host.free_bytes + held_bytes) * SLEEP_SHARE) if self.sleep_mb is None else self.sleep_mb << 20


@dataclass(frozen=True, slots=True)
class _Use:
    """Host memory that models hold now."""

    weight_bytes: int
    """Of loaded models."""
    sleeping_bytes: int
    page_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.sleeping_bytes + self.page_bytes


class HostBudget:
    """One per node, on the daemon's loop. Decides requests one after another."""

    def __init__(
        self,
        limits: HostLimits,
        models: Callable[[], Sequence[HostModel]],
        unload: Callable[[str], Awaitable[None]],
        pages: KvHostMemory,
        read: Callable[[], HostMemory] = read_host_memory,
    ) -> None:
        """`models`: those with weights in host memory. `unload`: unloads a model if it is still asleep."""
        self._limits = limits
        self._models = models
        self._unload = unload
        self._pages = pages
        self._read = read
        self._lock = asyncio.Lock()
        self._loading: dict[str, int] = {}
        """Model id → bytes that its load in progress will hold."""
        self._falling_asleep_bytes = 0
        self._withheld_bytes: int | None = None
        """Bytes of the budget that pages leave to weights now."""
        self._host = read()
        self._shortage: str | None = None

    # Room

    @contextlib.asynccontextmanager
    async def for_sleep(self, need_bytes: int) -> AsyncIterator[bool]:
        """Reserves memory for a model's weights while the context is open. Yields whether there is any."""
        async with self._lock:
            host = await self._read_now()
            left_bytes = self._left_bytes(host, self._reserved_bytes())
            budget_bytes = min(self._limits.sleep_bytes(host, self._use().sleeping_bytes), left_bytes)
            has_room = await self._made_room(need_bytes, budget_bytes)
            self._falling_asleep_bytes = need_bytes if has_room else 0
            self._limit_pages(await self._read_now())
            try:
                yield has_room
            finally:
                self._falling_asleep_bytes = 0

    def free_bytes(self, model_id: str) -> int:
        """Bytes that a load of the model may put into host memory, after the unload of sleeping models. As of the
        latest reading."""
        staying_bytes = sum(each.host_bytes for each in self._sleeping() if not each.can_be_unloaded)
        return self._left_bytes(self._host, self._reserved_bytes(but=model_id) + staying_bytes)

    @contextlib.asynccontextmanager
    async def for_weights(self, model_id: str, need_bytes: int) -> AsyncIterator[None]:
        """Reserves host memory for a load while the context is open. Raises InsufficientCapacity."""
        if not need_bytes:
            yield
            return
        async with self._lock:
            host = await self._read_now()
            left_bytes = self._left_bytes(host, self._reserved_bytes(but=model_id))
            free_bytes = self.free_bytes(model_id)
            if need_bytes > free_bytes or not await self._made_room(need_bytes, left_bytes):
                raise InsufficientCapacity(
                    f"{model_id} needs {gib(need_bytes)} of host memory in addition to its device, but models may take "
                    f"{gib(free_bytes)} more there: within limits.host_mb, with {gib(host.reserve_bytes)} left free, "
                    f"and at most {gib(self._limits.locked_bytes(host))} page-locked"
                )
            self._loading[model_id] = need_bytes
            self._limit_pages(await self._read_now())
        try:
            yield
        finally:
            del self._loading[model_id]
            self.settle()

    async def _made_room(self, need_bytes: int, budget_bytes: int) -> bool:
        room = make_room(need_bytes, budget_bytes, self._sleeping())
        for model_id in room.to_unload:
            await self._unload(model_id)
        # One of them may have been woken instead of unloaded.
        return room.fits and make_room(need_bytes, budget_bytes, self._sleeping()) == SleepPlan(fits=True)

    def settle(self) -> None:
        """Gives the memory of models that woke, were unloaded, or did not fall asleep back to pages."""
        is_less = self._withheld_bytes is not None and self._kept_bytes() < self._withheld_bytes
        if is_less and not self._lock.locked():
            self._limit_pages(self._host)

    def _limit_pages(self, host: HostMemory) -> None:
        self._withheld_bytes = self._kept_bytes()
        self._pages.give_way(max(0, self._budget_bytes(host) - self._withheld_bytes))

    # Use

    def _sleeping(self) -> list[HostModel]:
        return [each for each in self._models() if each.sleeps]

    def _use(self) -> _Use:
        weight_bytes = sum(each.host_bytes for each in self._models() if not each.sleeps)
        return _Use(weight_bytes, sum(each.host_bytes for each in self._sleeping()), self._pages.num_bytes)

    def _reserved_bytes(self, but: str | None = None) -> int:
        """Bytes of weights that loaded models hold, or will."""
        held = {each.model_id: each.host_bytes for each in self._models() if not each.sleeps}
        models = (held | self._loading).keys() - {but}
        return sum(max(held.get(each, 0), self._loading.get(each, 0)) for each in models)

    def _kept_bytes(self) -> int:
        return self._reserved_bytes() + self._use().sleeping_bytes + self._falling_asleep_bytes

    def _budget_bytes(self, host: HostMemory) -> int:
        return self._limits.budget_bytes(host, self._use().num_bytes)

    def _left_bytes(self, host: HostMemory, reserved_bytes: int) -> int:
        return max(0, self._budget_bytes(host) - reserved_bytes)

    async def _read_now(self) -> HostMemory:
        self._host = await asyncio.to_thread(self._read)
        return self._host

    # Watch

    async def watch(self) -> None:
        """Keeps the host's reserve free as models use more memory: drops pages first, then unloads sleeping models one
        at a time, and reports the rest."""
        host = await self._read_now()
        missing_bytes, use = host.num_missing_bytes(), self._use()
        if missing_bytes and use.page_bytes:
            self._pages.give_way(max(0, use.page_bytes - missing_bytes))
        elif missing_bytes and not self._lock.locked():
            for model in _longest_idle(self._sleeping())[:1]:
                log.warning(
                    "%s: unloaded, because only %s of host memory are free", model.model_id, gib(host.free_bytes)
                )
                await self._unload(model.model_id)
        shortage = None
        if missing_bytes and use.weight_bytes and not use.page_bytes and not use.sleeping_bytes:
            shortage = (
                f"the host has {gib(host.free_bytes)} of memory left, less than the {gib(host.reserve_bytes)} that "
                f"should stay free, and models need the {gib(use.weight_bytes)} that they have there; unload one, or "
                "end other programs"
            )
            if self._shortage is None:
                log.warning("%s", shortage)
        elif self._shortage is not None:
            log.info("the host has enough memory again: %s", gib(host.free_bytes))
        self._shortage = shortage

    # Reports

    def _locked_bytes(self) -> int:
        """All pages and sleeping weights, if a GPU copies them."""
        use = self._use()
        copied_bytes = use.sleeping_bytes + use.page_bytes if self._limits.has_gpu else 0
        return copied_bytes + sum(each.locked_bytes for each in self._models() if not each.sleeps)

    def health(self) -> HostHealth:
        """As of the latest reading."""
        use = self._use()
        return HostHealth(
            total_bytes=self._host.total_bytes,
            free_bytes=self._host.free_bytes,
            budget_bytes=self._budget_bytes(self._host),
            weight_bytes=use.weight_bytes,
            sleeping_bytes=use.sleeping_bytes,
            kv_bytes=use.page_bytes,
            locked_bytes=self._locked_bytes(),
            locked_limit_bytes=self._limits.locked_bytes(self._host),
            shortage=self._shortage,
        )
