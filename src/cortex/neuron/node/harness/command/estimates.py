"""Memory estimates for a model that a server runs, from its files and from measurements of its servers.

The estimate is a quantile of the latest starts and runs. A single unusual run counts only as one sample and expires, so
that one peak does not keep a model out of memory in which it has run before.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from cortex.neuron.node.harness.estimates import Footprint, NodeLimits
from cortex.neuron.node.library import KnownModel
from cortex.neuron.node.memory.ceilings import smallest
from cortex.neuron.servers.entry import HarnessEntry
from cortex.wire.node.protocol import Device

_QUANTILE = 0.75
_MAX_SAMPLES = 16
MAX_AGE_S = 30 * 86400.0


def quantile(sizes: Iterable[int], share: float = _QUANTILE) -> int:
    """The smallest size that at least this share of the sizes does not exceed; 0 without any."""
    ordered = sorted(sizes)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0


class _Samples:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._all: deque[tuple[float, int]] = deque(maxlen=_MAX_SAMPLES)
        """Time and bytes."""

    def add(self, num_bytes: int) -> None:
        self._all.append((self._clock(), num_bytes))

    @property
    def size(self) -> int:
        oldest = self._clock() - MAX_AGE_S
        return quantile(num_bytes for at, num_bytes in self._all if at >= oldest)


class ServerSizes:
    """By model id. Belongs to the daemon's loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._starts: dict[str, _Samples] = {}
        self._runs: dict[str, _Samples] = {}

    def note_start(self, model_id: str, num_bytes: int) -> None:
        """Record the bytes that a server held when it was ready."""
        self._starts.setdefault(model_id, _Samples(self._clock)).add(num_bytes)

    def note_run(self, model_id: str, num_bytes: int) -> None:
        """Record the bytes that it held for most of its run."""
        self._runs.setdefault(model_id, _Samples(self._clock)).add(num_bytes)

    def start_bytes(self, model_id: str) -> int:
        """Bytes with which it can start; 0 if unknown."""
        samples = self._starts.get(model_id)
        return 0 if samples is None else samples.size

    def run_bytes(self, model_id: str) -> int:
        """Bytes that it takes while it serves; 0 if unknown."""
        samples = self._runs.get(model_id)
        return 0 if samples is None else samples.size

    def forget(self, model_id: str) -> None:
        self._starts.pop(model_id, None)
        self._runs.pop(model_id, None)

    @property
    def basis(self) -> object:
        """Changes with every size."""
        return tuple(
            (model_id, samples.size) for each in (self._starts, self._runs) for model_id, samples in each.items()
        )


@dataclass(frozen=True, slots=True)
class ServedFiles:
    """A node's metadata about a model that a server runs; the contents of its files are unknown."""

    path: Path
    family: str
    digest: str
    num_bytes: int
    context_tokens: int
    """0: unknown."""
    num_ranks: int
    quant: str | None = None
    """From the operator or the file's name; None if unknown."""
    num_layers: ClassVar[int] = 0
    most_stages: ClassVar[int] = 1
    has_stages: ClassVar[bool] = False
    pooling: ClassVar[None] = None
    stored: ClassVar[None] = None

    @property
    def backend(self) -> str:
        return self.family

    @property
    def file_bytes(self) -> int | None:
        return self.num_bytes or None


@dataclass(frozen=True, slots=True)
class CommandEstimates(NodeLimits):
    """Estimates from the sizes of its latest servers, before that from the operator's size or the files. The bytes held
    when ready are the minimum, those held while serving the expected size. A measurement may be too small, because
    another model left the device during the load: the operator's size is a lower bound, and a measurement below the
    size of the files does not count."""

    loads_in_worker: ClassVar[bool] = False
    entry: HarnessEntry
    sizes: ServerSizes = field(default_factory=ServerSizes)

    def least_bytes(self, model: KnownModel, metadata: ServedFiles, device: Device) -> int:  # noqa: ARG002 - as Estimates
        return self._least_bytes(model, metadata) // metadata.num_ranks

    smallest_bytes = least_bytes

    def expected_bytes(self, model: KnownModel, metadata: ServedFiles, device: Device) -> int:
        """At most what the device can give, because it may serve with less than it once took."""
        least = self.least_bytes(model, metadata, device)
        usable = self.reserve(device).usable_bytes(device.total_bytes)
        most = smallest(usable, self.share_bytes(model, device)) or usable
        return max(least, min(self.whole_bytes(model, metadata) // metadata.num_ranks, most))

    def context_bytes(self, model: KnownModel, metadata: ServedFiles, device: Device, tokens: int) -> int:  # noqa: ARG002
        """A server has a context of its own."""
        return self.least_bytes(model, metadata, device)

    def whole_bytes(self, model: KnownModel, metadata: ServedFiles) -> int:
        """Bytes that it takes while it serves, over all devices of this node."""
        run_bytes = self.sizes.run_bytes(model.id) // model.num_members
        return max(
            self._least_bytes(model, metadata), self.counted_bytes(model, metadata, run_bytes) if run_bytes else 0
        )

    def _least_bytes(self, model: KnownModel, metadata: ServedFiles) -> int:
        return self.counted_bytes(model, metadata, self.sizes.start_bytes(model.id) // model.num_members)

    def counted_bytes(self, model: KnownModel, metadata: ServedFiles, measured: int) -> int:
        """The size that a model counts as if its server holds `measured` bytes, loaded or not. Pages of its files that
        other programs have mapped too are not in the measurement, but become its own when these end. The members of a
        group have equal parts."""
        if (configured := self._configured_bytes(model)) is not None:
            return max(measured, configured)
        if measured and measured >= metadata.num_bytes // model.num_members:
            return measured
        return _unmeasured(metadata) // model.num_members

    def first_bytes(self, model: KnownModel, metadata: ServedFiles) -> int:
        """The size without measurements. A server with a configured size takes a little more than that."""
        configured = self._configured_bytes(model)
        return _unmeasured(metadata) // model.num_members if configured is None else configured

    def _configured_bytes(self, model: KnownModel) -> int | None:
        # Not `model.memory_bytes`, which may be no more than the ceiling of a gateway.
        own = (entry.memory_mb for entry in (*self.config.models, *self.config.default_models) if entry.id == model.id)
        expected_mb = next((size for size in own if size is not None), self.entry.memory_mb)
        return None if expected_mb is None else (expected_mb << 20) // model.num_members

    def footprint(self, model: KnownModel, metadata: ServedFiles, devices: Sequence[Device]) -> Footprint:
        expected = max(self.expected_bytes(model, metadata, device) for device in devices)
        return Footprint(self._least_bytes(model, metadata), metadata.num_ranks * expected)

    def stages(self, *_: Any) -> None:
        """The node does not divide the layers of a server's model."""

    empty_stages = stages

    def basis(self, device: Device) -> object:  # noqa: ARG002 - as Estimates
        return self.sizes.basis


@dataclass(frozen=True, slots=True)
class SizeOfModel:
    """Through this the host of one server reports its memory."""

    estimates: CommandEstimates
    model: KnownModel
    metadata: ServedFiles

    def started(self, num_bytes: int) -> int:
        """It is ready and holds this much. Returns the size that the model counts as."""
        self.estimates.sizes.note_start(self.model.id, num_bytes * self.model.num_members)
        return self.holds(num_bytes)

    def holds(self, num_bytes: int) -> int:
        """The same for what it holds later."""
        return self.estimates.counted_bytes(self.model, self.metadata, num_bytes)

    def ran(self, num_bytes: int) -> None:
        """It has ended, after holding this much for most of its run."""
        self.estimates.sizes.note_run(self.model.id, num_bytes * self.model.num_members)


def _unmeasured(metadata: ServedFiles) -> int:
    return metadata.num_bytes * 5 // 4
