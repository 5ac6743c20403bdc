"""What a harness reports to placement about a model: its files, and its memory."""

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
    """Bytes that it takes of the largest device, if otherwise empty; 0 if unknown."""
    contexts: ContextSizes | None = None
    """The sizes of the contexts in between; None if unknown."""
    splits: HostSplits | None = None
    """How its weights can be divided between device and host; None if impossible or not permitted."""
    last_resort: HostSplits | None = None
    """How they could be divided if its entry permitted it; None if impossible or already permitted."""


class FileMetadata(Protocol):
    """The metadata that a harness has read from a model's files."""

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
        """The backend of the model: `native`, or the name of a library."""

    @property
    def has_stages(self) -> bool:
        """Whether it can be divided by layers."""

    @property
    def pooling(self) -> PoolingConfig | None:
        """How the model pools texts; None if it generates text."""

    @property
    def num_ranks(self) -> int:
        """Number of devices that the model is divided among. If it is more than one, this is the metadata of one."""

    @property
    def file_bytes(self) -> int | None:
        """Bytes of its weights in its files; None if unknown, or for the metadata of a part."""

    @property
    def stored(self) -> StoredForm | None:
        """The form of its files; None if only a server knows it."""

    @property
    def digest(self) -> str:
        """Equal for the same model on different nodes."""


class Estimates(Protocol):
    """The memory of a model, in bytes. `metadata` comes from the same harness. Pure."""

    @property
    def loads_in_worker(self) -> bool:
        """Whether models are loaded in the workers of their devices; each worker runs one load at a time."""

    def reserve(self, device: Device) -> MemoryReserve:
        """The memory of the device that a load leaves free. See `NodeLimits`."""

    def share_bytes(self, model: KnownModel, device: Device) -> int | None:
        """Bytes that the operator's ceilings permit the model on the device. See `NodeLimits`."""

    def least_bytes(self, model: KnownModel, metadata: Any, device: Device) -> int:
        """The least memory with which the model can respond; a device with less rejects it."""

    def context_bytes(self, model: KnownModel, metadata: Any, device: Device, tokens: int) -> int:
        """Bytes that a load must be able to take of the device for a context of `tokens`; at least `least_bytes`."""

    def smallest_bytes(self, model: KnownModel, metadata: Any, device: Device) -> int:
        """A lower limit (`memory_mb`) can never be met."""

    def expected_bytes(self, model: KnownModel, metadata: Any, device: Device) -> int:
        """Bytes that it will take of the otherwise empty device."""

    def footprint(self, model: KnownModel, metadata: Any, devices: Sequence[Device]) -> Footprint:
        """On those of `devices` that the model may use, all ranks and replicas together."""

    def stages(
        self,
        model: KnownModel,
        metadata: Any,
        device: Device,
        capacities: Sequence[int],
        ceilings: Sequence[int | None],
    ) -> tuple[StageSpec, ...] | None:
        """The layers for each of several devices like `device`, one for each of `capacities`; None if they cannot hold
        the model, or it cannot be divided."""

    def empty_stages(self, model: KnownModel, metadata: Any, devices: Sequence[Device]) -> tuple[StageSpec, ...] | None:
        """The layers of each device while all of them are empty."""

    def split(self, model: KnownModel, metadata: Any, device: Device, lacking_bytes: int) -> HostSplit | str:
        """The weights to keep in host memory if the device lacks `lacking_bytes`, or why that is impossible. See
        `NodeLimits`."""

    def basis(self, device: Device) -> object:
        """State that the estimates depend on in addition to their arguments; they are recomputed when it changes."""


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """The part of `Estimates` that does not depend on the harness: the operator's limits on a device, and the memory
    that loads leave free."""

    config: NeuronConfig

    def reserve(self, device: Device) -> MemoryReserve:
        """The memory of the device that a load leaves free."""
        return MemoryReserve.on(device.kind, device.total_bytes, self.config.limits.min_free_vram_mb << 20)

    def share_bytes(self, model: KnownModel, device: Device) -> int | None:
        """Bytes that the operator's ceilings permit the model on the device while no other model is loaded."""
        return Ceilings.of(self.config).share_bytes(device.index, model.num_devices)

    def split(self, model: KnownModel, metadata: Any, device: Device, lacking_bytes: int) -> HostSplit | str:  # noqa: ARG002
        """The weights to keep in host memory if device memory lacks, or a text with the reason why none can be."""
        return "only the built-in engine divides weights between device and host memory"
