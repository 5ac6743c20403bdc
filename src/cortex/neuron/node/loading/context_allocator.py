"""Frees memory for contexts: unloads models for a load that this node decides on, and reloads models once a longer
context fits.

A load ordered by a gateway evicts nothing here, because the gateway decides which models stay. Such a model grows as
soon as memory is free; the gateway orders the rest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from cortex.neuron.node.controller import ModelController
from cortex.neuron.node.harness.estimates import FileMetadata
from cortex.neuron.node.library import KnownModel
from cortex.neuron.node.loading.device_allocator import DeviceAllocator
from cortex.neuron.node.loading.loader import ModelLoader
from cortex.neuron.node.memory.ceilings import ModelHolding
from cortex.neuron.node.models import IdleModel, Models
from cortex.wire.node.contexts import ContextSizes, tolerated, tried
from cortex.wire.node.protocol import ModelState

log = logging.getLogger(__name__)

Fits = Callable[[Sequence[IdleModel]], Awaitable[bool]]
"""Whether the load fits once these models are unloaded."""


@dataclass(frozen=True, slots=True)
class ContextRules:
    """When a model is unloaded for another, or reloaded for a longer context."""

    min_idle_s: float = 5.0
    """Models that had a request or were loaded more recently are not touched."""
    check_s: float = 5.0
    num_checks: int = 3
    """Consecutive checks that must find the memory free, because a load that is about to begin may need it."""
    retry_s: float = 600.0
    """Delay before a model that did not get the expected context is tried again; it doubles each time."""


def growth(contexts: ContextSizes, tokens: int) -> list[int]:
    """The contexts for which a model with `tokens` is reloaded, longest first: the full one and, if it has less than
    wanted, also the wanted one and any of at least twice the length."""
    if tokens >= tolerated(contexts.full_tokens):
        return []
    least = contexts.full_tokens
    if tokens < tolerated(contexts.wanted_tokens):
        least = min(contexts.wanted_tokens, 2 * tokens)
    return [each for each in tried(contexts.full_tokens, contexts.wanted_tokens) if each >= least]


async def victims(idle: Sequence[IdleModel], fits: Fits) -> Sequence[IdleModel] | None:
    """The models of `idle` to unload, in order, and no more than needed; None if all of them are not enough."""
    chosen: list[IdleModel] = []
    for each in idle:
        if await fits(chosen):
            break
        chosen.append(each)
    if not await fits(chosen):
        return None
    for each in sorted(chosen, key=lambda model: -model.holding.num_bytes):
        others = [other for other in chosen if other is not each]
        if await fits(others):
            chosen = others
    return chosen


@dataclass(frozen=True, slots=True)
class _Reload:
    """A reload for a longer context."""

    at_s: float
    """On the loop's clock."""
    target: int
    num_failures: int
    """Consecutive reloads that gave less context than expected."""
    num_orders: int
    """Loads that were ordered before it."""


class ContextAllocator:
    """Belongs to the daemon's loop."""

    def __init__(
        self,
        room: DeviceAllocator,
        loader: ModelLoader,
        models: Models,
        rules: ContextRules,
        *,
        kept: Collection[str],
    ) -> None:
        """`kept`: the models loaded at the node's start, which are not unloaded for others."""
        self._room = room
        self._loader = loader
        self._models = models
        self._rules = rules
        self._kept = frozenset(kept)
        self._seen: dict[str, int] = {}
        """Model id → consecutive checks that found room for a longer context."""
        self._reloads: dict[str, _Reload] = {}
        """The latest one of each model since its load was ordered."""

    async def make_room(self, model: KnownModel, metadata: FileMetadata) -> bool:
        """Unloads idle models for the context that the load of `model` asks for. False, with nothing unloaded, if that
        would not be enough."""
        found = await victims(self._evictable(model.id), self._fits(model, metadata))
        if found is None:
            return False
        for each in found:
            log.info("%s: evicted for %s after %.0f s without requests", each.holding.model_id, model.id, each.idle_s)
        await asyncio.gather(*map(self._evict, found))
        return True

    async def _evict(self, idle: IdleModel) -> None:
        if self._room.sleep_frees and idle.controller.life.state is ModelState.READY:
            await idle.controller.ensure_asleep(0.0)
        else:
            await idle.controller.ensure_gone(0.0)

    def _fits(self, model: KnownModel, metadata: FileMetadata, own: Sequence[ModelHolding] = ()) -> Fits:
        async def fits(leaving: Sequence[IdleModel]) -> bool:
            return await self._room.fits_without(model, metadata, [*own, *(each.holding for each in leaving)])

        return fits

    def _evictable(self, model_id: str, longer_s: float = 0.0) -> list[IdleModel]:
        """The models that may be unloaded for another, which have been idle for longer than `longer_s`."""
        return [
            each
            for each in self._models.idle()
            if each.holding.model_id not in (model_id, *self._kept)
            and each.idle_s >= max(longer_s, self._rules.min_idle_s)
            and each.controller.model.member is None
        ]

    async def run(self) -> None:
        """Reloads models that can have a longer context, one after another."""
        while True:
            await asyncio.sleep(self._rules.check_s)
            if self._models.is_any_changing():
                self._seen.clear()
                continue
            idle = [each for each in self._models.idle() if each.controller.life.state is ModelState.READY]
            self._seen = {each.holding.model_id: self._seen.get(each.holding.model_id, 0) for each in idle}
            for each in idle:
                if await self._grow(each):
                    break

    async def _grow(self, idle: IdleModel) -> bool:
        """Reloads the model if a longer context fits; whether it does."""
        model, tokens = idle.controller.model, idle.instance.resident.info.context_tokens
        target = await self._target(idle, tokens) if idle.idle_s >= self._rules.min_idle_s else None
        self._seen[model.id] = 0 if target is None else self._seen[model.id] + 1
        if target is None or self._seen[model.id] < self._rules.num_checks:
            return False
        if not any(each.instance is idle.instance for each in self._models.idle()):  # a request came meanwhile
            return False
        log.info("%s: loaded again for a context of %d tokens instead of %d", model.id, target, tokens)
        failed = self._failed_reload(idle.controller, tokens)
        num_failures = 0 if failed is None else failed.num_failures + 1
        now_s, num_orders = asyncio.get_running_loop().time(), idle.controller.num_orders
        self._reloads[model.id] = _Reload(now_s, target, num_failures, num_orders)
        idle.controller.reload()
        return True

    async def _target(self, idle: IdleModel, tokens: int) -> int | None:
        """The longest context that the model can have and is worth another load."""
        model = idle.controller.model
        contexts, inspection = self._loader.contexts(model), self._loader.inspections.get(model.id)
        if contexts is None or inspection is None or not self._may_retry(idle.controller, tokens):
            return None
        evictable = self._evictable(model.id, idle.idle_s) if model.min_context_tokens is None else []
        for target in growth(contexts, tokens):
            grown = self._loader.with_context(model, inspection.metadata, tolerated(target))
            if grown is None or grown.min_context_tokens != tolerated(target):
                continue
            fits = self._fits(grown, inspection.metadata, [idle.holding])
            if await fits(()) or (target <= contexts.wanted_tokens and await victims(evictable, fits) is not None):
                return target
        return None

    def _failed_reload(self, controller: ModelController, tokens: int) -> _Reload | None:
        """The latest reload, if it gave less context than expected: only `tokens`."""
        latest = self._reloads.get(controller.model_id)
        if latest is None or latest.num_orders != controller.num_orders:
            return None
        return latest if tokens < tolerated(latest.target) else None

    def _may_retry(self, controller: ModelController, tokens: int) -> bool:
        failed = self._failed_reload(controller, tokens)
        if failed is None:
            return True
        return asyncio.get_running_loop().time() - failed.at_s >= self._rules.retry_s * (1 << failed.num_failures)
