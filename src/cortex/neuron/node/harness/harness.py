"""The interface of a harness, which runs models, and of its server, if that takes requests as text; and the harnesses
of a node by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from cortex.http.upstream.pool import Pool
from cortex.neuron.node.harness.estimates import Estimates, FileFacts, Footprint
from cortex.neuron.node.library import KnownModel
from cortex.neuron.node.memory.allocation import ChosenDevices, DeviceAllocation
from cortex.neuron.text.model import TextSurvey
from cortex.neuron.worker.model_host import ModelHost
from cortex.system.tasks import finish_all
from cortex.wire.errors import ModelUnsupported, shorten
from cortex.wire.node.model_log import ModelLog


class Upstream(Protocol):
    """The server that takes the requests of a model as text: OpenAI chat, or whatever its routes say."""

    @property
    def harness(self) -> str: ...

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of every request, in place of those of the client; among them the name of the model."""

    @property
    def stripped_fields(self) -> tuple[str, ...]:
        """Fields that no request has."""

    def log(self, after: int) -> ModelLog:
        """The lines that its servers wrote after the first `after` ones, as far as they are kept."""

    def pool(self) -> Pool:
        """Takes requests that have a slot (`Node.generate`). Raises Recovering where the server has just ended."""

    def check_route(self, path: str) -> None:
        """Raises UnsupportedModality for a path that the server does not have."""

    async def end_if_hung(self, reason: str) -> None:
        """A response is overdue. Unless another one goes on, or the server responds to a health check, it is ended, as
        one that has crashed."""

    async def check_lost(self) -> None:
        """For a request that failed: raises Recovering where the server has ended, or ends in a moment from now."""

    def produced(self, request_id: str) -> None:
        """The response has begun."""

    def finished(self, request_id: str, prompt_tokens: int, completion_tokens: int) -> None:
        """The response is complete: the slot is free."""


class Harness(Protocol):
    """Runs models. Placement chooses devices by the estimates of a harness, and knows nothing else about it. What users
    should know about a loaded model is in the notes of its host's `Resident`."""

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
        """Whether a model that is lost is loaded again before it is asked for."""

    def check(self, model: KnownModel) -> None:
        """Raises LoadFailed for options that it does not support, before any file is read."""

    def needs_files(self, model: KnownModel) -> bool:
        """Whether the model's files must be on this node."""

    async def read(self, model: KnownModel, path: Path) -> tuple[FileFacts, Mapping[str, Footprint]]:
        """What the model's files say, and its memory with each quantisation that it could be loaded with instead.
        Raises LoadFailed for a model that it cannot run."""

    async def read_text(self, model: KnownModel, path: Path) -> TextSurvey:
        """What it can do with text. Raises LoadFailed."""

    async def host(self, model: KnownModel, facts: Any, room: DeviceAllocation) -> tuple[ModelHost, ChosenDevices]:
        """The host for a load on the devices of `room`, and the devices with the stages of the model. Raises
        LoadFailed, InsufficientCapacity, LoadRejected or WorkerLost."""

    def replica(self, model: KnownModel, facts: Any, chosen: ChosenDevices) -> ModelHost:
        """The host of one more replica of a model that may have extra ones."""

    def forget_size(self, model_id: str) -> None:
        """Forgets what the model has taken."""

    def upstream(self, model: KnownModel) -> Upstream | None:
        """The server that takes the model's requests as text. None: its host takes them as tokens."""

    async def close(self) -> None:
        """Ends all models, whatever they do."""


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
