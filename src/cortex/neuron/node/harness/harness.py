"""The interfaces of a harness, which runs models, and of a server that takes requests as text; and a node's harnesses
by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from cortex.http.upstream.pool import Pool
from cortex.neuron.node.harness.estimates import Estimates, FileMetadata, Footprint
from cortex.neuron.node.library import KnownModel
from cortex.neuron.node.memory.allocation import ChosenDevices, DeviceAllocation
from cortex.neuron.text.model import TextInspection
from cortex.neuron.worker.model_host import ModelHost
from cortex.system.tasks import finish_all
from cortex.wire.errors import ModelUnsupported, shorten
from cortex.wire.node.orders import ModelLog


class Upstream(Protocol):
    """The server that takes the requests of a model as text: OpenAI chat, or whatever its routes say."""

    @property
    def harness(self) -> str: ...

    @property
    def fields(self) -> dict[str, Any]:
        """Fields set in every request, overriding those of the client, including the model's name."""

    @property
    def stripped_fields(self) -> tuple[str, ...]:
        """Fields removed from every request."""

    def log(self, after: int) -> ModelLog:
        """The kept lines that its servers wrote after the first `after` ones."""

    def pool(self) -> Pool:
        """Connections for requests that have a slot (`Node.generate`). Raises Recovering if the server has just
        ended."""

    def check_route(self, path: str) -> None:
        """Raises UnsupportedModality for a path that the server does not have."""

    async def end_if_hung(self, reason: str) -> None:
        """A response is overdue. Ends the server, as if it had crashed, unless another response progresses or it
        responds to a health check."""

    async def check_lost(self) -> None:
        """For a failed request: raises Recovering if the server has ended, or ends within a moment."""

    def produced(self, request_id: str) -> None:
        """The response has begun."""

    def finished(self, request_id: str, prompt_tokens: int, completion_tokens: int) -> None:
        """The response is complete: the slot is free."""


class Harness(Protocol):
    """Runs models. Placement knows only the estimates of a harness. Notes for users about a loaded model are in its
    host's `Resident`."""

    @property
    def names(self) -> Sequence[str]:
        """The names that models select it by, the current one first."""

    @property
    def estimates(self) -> Estimates: ...

    @property
    def max_num_seqs(self) -> int:
        """Maximum requests that one replica of a model runs at once."""

    @property
    def restarts(self) -> bool:
        """Whether a lost model is reloaded without a request."""

    def check(self, model: KnownModel) -> None:
        """Raises LoadFailed for options that it does not support, before any file is read."""

    def needs_files(self, model: KnownModel) -> bool:
        """Whether the model's files must be on this node."""

    async def read(self, model: KnownModel, path: Path) -> tuple[FileMetadata, Mapping[str, Footprint]]:
        """The metadata from the model's files, and its memory with each other quantisation that it could be loaded
        with. Raises LoadFailed for a model that it cannot run."""

    async def read_text(self, model: KnownModel, path: Path) -> TextInspection:
        """The model's text capabilities. Raises LoadFailed."""

    async def host(self, model: KnownModel, metadata: Any, room: DeviceAllocation) -> tuple[ModelHost, ChosenDevices]:
        """The host for a load on the devices of `room`, and the devices with the stages of the model. Raises
        LoadFailed, InsufficientCapacity, LoadRejected or WorkerLost."""

    def replica(self, model: KnownModel, metadata: Any, chosen: ChosenDevices) -> ModelHost:
        """The host of one more replica of a model that may have extra ones."""

    def forget_size(self, model_id: str) -> None:
        """Discards the measured sizes of the model."""

    def upstream(self, model: KnownModel) -> Upstream | None:
        """The server that takes the model's requests as text. None if its host takes tokens."""

    async def close(self) -> None:
        """Ends all models, whatever they are doing."""


class Harnesses:
    """By name."""

    def __init__(self, *harnesses: Harness) -> None:
        self._by_name = {name: harness for harness in harnesses for name in harness.names}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def add(self, harness: Harness) -> None:
        self._by_name |= dict.fromkeys(harness.names, harness)

    def named(self, name: str) -> Harness:
        """Raises ModelUnsupported, which lists them."""
        if (harness := self._by_name.get(name)) is None:
            raise ModelUnsupported(f"this node has no harness {shorten(name)!r}; it has {', '.join(self._by_name)}")
        return harness

    def of(self, model: KnownModel) -> Harness:
        """Raises ModelUnsupported."""
        return self.named(model.harness)

    async def close(self) -> None:
        await finish_all("closing a harness", *(harness.close() for harness in set(self._by_name.values())))
