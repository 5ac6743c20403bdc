"""The operator's ceilings on memory of models (`limits.memory_mb`, `devices.memory_mb`), and the bytes left under
them.

A ceiling limits what models hold: weights, KV caches and other allocations of their workers. It is independent of free
memory, which `limits.min_free_vram_mb` limits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from cortex.formats.units import gib
from cortex.neuron.config import NeuronConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelHolding:
    """A model in device memory."""

    model_id: str
    devices: tuple[int, ...]
    device_bytes: tuple[int, ...]
    """What it holds on each of them."""
    process_bytes: int | None = None
    """What its unload frees, if known; on a CPU a cache takes memory only once it is used."""

    @property
    def num_bytes(self) -> int:
        return sum(self.device_bytes)

    @property
    def freed_bytes(self) -> tuple[int, ...]:
        """What its unload frees of each of them, at most."""
        if self.process_bytes is None:
            return self.device_bytes
        return equal_parts(self.process_bytes, len(self.devices))

    def bytes_on(self, index: int) -> int:
        return self.device_bytes[self.devices.index(index)] if index in self.devices else 0


@dataclass(frozen=True, slots=True)
class Ceilings:
    """As configured."""

    node_bytes: int | None = None
    """For all devices together."""
    device_bytes: tuple[tuple[int, int], ...] = ()
    """Device index and bytes."""

    @classmethod
    def of(cls, config: NeuronConfig) -> Ceilings:
        limit_mb = config.limits.memory_mb
        return cls(
            None if limit_mb is None else limit_mb << 20,
            tuple((device.index, device.memory_mb << 20) for device in config.devices),
        )

    def on(self, index: int) -> int | None:
        """The ceiling of one device."""
        return dict(self.device_bytes).get(index)

    def share_bytes(self, index: int, num_devices: int) -> int | None:
        """Bytes that a model over `num_devices` may take of the device while no other model is loaded."""
        return smallest(self.on(index), None if self.node_bytes is None else self.node_bytes // num_devices)


class MemoryCeilings:
    """Belongs to the daemon's loop."""

    def __init__(self, ceilings: Ceilings, holdings: Callable[[], Iterable[ModelHolding]]) -> None:
        """`holdings`: the models that are in device memory now."""
        self.configured = ceilings
        self._holdings = holdings
        self._exceeded: set[str] = set()
        """Ceilings already reported as exceeded."""

    def left_bytes(
        self,
        index: int,
        num_devices: int,
        *,
        but: str,
        loading: Iterable[ModelHolding] = (),
        gone: Collection[str] = (),
    ) -> int | None:
        """Bytes that the model `but`, over `num_devices`, may take of the device in addition to the other models; None
        without a ceiling. `loading`: holdings of loads in progress. `gone`: models that do not count."""
        held = list(self._holdings())
        held += [_beyond(coming, held) for coming in loading]
        others = [holding for holding in held if holding.model_id != but and holding.model_id not in gone]
        here = sum(holding.bytes_on(index) for holding in others)
        own, node = self.configured.on(index), self.configured.node_bytes
        return smallest(
            None if own is None else max(0, own - here),
            None if node is None else max(0, node - sum(holding.num_bytes for holding in others)) // num_devices,
        )

    def watch(self) -> None:
        """Warns once when models exceed a ceiling, because servers take memory as they serve."""
        held, configured = list(self._holdings()), self.configured
        limits = [(f"memory_mb of device {index}", limit, index) for index, limit in configured.device_bytes]
        found = [(name, limit, sum(each.bytes_on(index) for each in held)) for name, limit, index in limits]
        if configured.node_bytes is not None:
            found.append(("limits.memory_mb", configured.node_bytes, sum(each.num_bytes for each in held)))
        for name, limit, num_bytes in found:
            if num_bytes > limit and name not in self._exceeded:
                models = ", ".join(f"{each.model_id} {gib(each.num_bytes)}" for each in held)
                log.warning("models hold %s, but %s is %s: %s", gib(num_bytes), name, gib(limit), models)
        self._exceeded = {name for name, limit, num_bytes in found if num_bytes > limit}


def _beyond(coming: ModelHolding, held: Iterable[ModelHolding]) -> ModelHolding:
    """Bytes that a load will add to what its model already holds, as during a wake."""
    own = [holding for holding in held if holding.model_id == coming.model_id]
    parts = zip(coming.devices, coming.device_bytes, strict=True)
    more = (max(0, size - sum(holding.bytes_on(index) for holding in own)) for index, size in parts)
    return ModelHolding(coming.model_id, coming.devices, tuple(more))


def equal_parts(num_bytes: int, count: int) -> tuple[int, ...]:
    return (num_bytes // count,) * count


def smallest(*limits: int | None) -> int | None:
    """The lowest of the limits that are set."""
    return min((limit for limit in limits if limit is not None), default=None)
