"""What placement asks a harness about a model: its files, and the memory that it needs and takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cortex.neuron.config import NeuronConfig
from cortex.neuron.engine.memory.reserve import MemoryReserve
from cortex.neuron.engine.request import StageSpec
from cortex.neuron.models.pooling.config import PoolingConfig
from cortex.neuron.node.library import KnownModel
from cortex.neuron.node.memory.ceilings import Ceilings
from cortex.wire.node.contexts import ContextSizes
from cortex.wire.node.host_splits import HostSplit, HostSplits
from cortex.wire.node.protocol import Device, StoredForm


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory of a model on a node, before it is loaded."""

    least_bytes: int
    """The least memory with which some device accepts it."""
    expected_bytes: int
    """What it takes of the largest device, if that is otherwise empty; 0: that is not known."""
    contexts: ContextSizes | None = None
    """What the contexts between both take; None: they are not known."""
    splits: HostSplits | None = None
    """How its weights can be divided between device and host; None: they cannot, or may not."""
    last_resort: HostSplits | None = None
    """How they could be if its entry said so; None: in no way, or it says so."""


class FileFacts(Protocol):
    """What a harness has found in a model's files."""

    @property
    def path(self) -> Path: ...
    @property
    def family(self) -> str: ...

    @property
    def quant(self) -> str | None:
        """The format of most weights, unless they are dense."""

    @property
    def context_tokens(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def most_stages(self) -> int:
        """How many parts it can be divided into by layers."""

    @property
    def backend(self) -> str:
        """What runs the model: `native`, or the name of a library."""

    @property
    def has_stages(self) -> bool:
        """Whether it can be divided by layers."""

    @property
    def pooling(self) -> PoolingConfig | None:
        """What the model does with texts instead of continuing them; None: it generates text."""

    @property
    def num_ranks(self) -> int:
        """Number of devices that the model is divided among. If it is more than one, these are the facts of one."""

    @property
    def file_bytes(self) -> int | None:
        """What its weights take in its files; None where that is not known, or these are the facts of a part."""

    @property
    def stored(self) -> StoredForm | None:
        """The form of its files; None where only a server knows it."""

    @property
    def digest(self) -> str:
        """Equal for the same model on different nodes."""


class Estimates(Protocol):
    """The memory of a model, in bytes. `facts`: as the same harness has found them. Pure."""

    @property
    def loads_in_worker(self) -> bool:
        """Whether models are loaded in the workers of their devices, of which each runs one load at a time."""

    def reserve(self, device: Device) -> MemoryReserve:
        """The memory of the device that a load leaves free. See `NodeLimits`."""

    def share_bytes(self, model: KnownModel, device: Device) -> int | None:
        """What the operator's ceilings let the model take of the device. See `NodeLimits`."""

    def least_bytes(self, model: KnownModel, facts: Any, device: Device) -> int:
        """The least memory with which the model can respond; a device with less rejects it."""

    def context_bytes(self, model: KnownModel, facts: Any, device: Device, tokens: int) -> int:
        """What a load must be able to take of the device for a context of `tokens`; at least `least_bytes`."""

    def smallest_bytes(self, model: KnownModel, facts: Any, device: Device) -> int:
        """A lower limit (`memory_mb`) can never be met."""

    def expected_bytes(self, model: KnownModel, facts: Any, device: Device) -> int:
        """What it will take of the otherwise empty device."""

    def footprint(self, model: KnownModel, facts: Any, devices: Sequence[Device]) -> Footprint:
        """On those of `devices` that the model may use, all ranks and replicas together."""

    def stages(
        self,
        model: KnownModel,
        facts: Any,
        device: Device,
        capacities: Sequence[int],
        ceilings: Sequence[int | None],
    ) -> tuple[StageSpec, ...] | None:
        """The layers for each of several devices like `device`, of which each can give one of `capacities`; None if
        they cannot hold the model, or it cannot be divided."""

    def empty_stages(self, model: KnownModel, facts: Any, devices: Sequence[Device]) -> tuple[StageSpec, ...] | None:
        """The layers of each device while all of them are empty."""

    def split(self, model: KnownModel, facts: Any, device: Device, lacking_bytes: int) -> HostSplit | str:
        """What of it lies in host memory where the device has `lacking_bytes` too few; or why that cannot be. See
        `NodeLimits`."""

    def basis(self, device: Device) -> object:
        """What the estimates depend on in addition to their arguments; they are computed again when it changes."""


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """The part of `Estimates` that is the same whatever runs the models: what the operator lets them take of a device,
    and what loads leave free on it."""

    config: NeuronConfig

    def reserve(self, device: Device) -> MemoryReserve:
        """The memory of the device that a load leaves free."""
        return MemoryReserve.on(device.kind, device.total_bytes, self.config.limits.min_free_vram_mb << 20)

    def share_bytes(self, model: KnownModel, device: Device) -> int | None:
        """What the operator's ceilings let the model take of the device while no other model is loaded."""
        return Ceilings.of(self.config).share_bytes(device.index, model.num_devices)

    def split(self, model: KnownModel, facts: Any, device: Device, lacking_bytes: int) -> HostSplit | str:  # noqa: ARG002
        """What of the model lies in host memory where the device lacks some; a text says why nothing does."""
        return "only the built-in engine divides weights between device and host memory"
