"""How models come up, and who is told how that goes: the seam between a model's owner and the bring-up all share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from cortex.neuron.node.instance import Instance
from cortex.neuron.node.lifecycle_events import Downloading, FilesReady, Input, ModelLost, ProducedTokens
from cortex.neuron.node.loading.library import KnownModel


class LoadObserver(Protocol):
    """Who is told how a bring-up goes, and later how the instance does."""

    def on_downloading(self) -> None: ...
    def on_files_at_hand(self) -> None: ...
    def on_progress(self, stage: str, done_bytes: int, total_bytes: int) -> None: ...
    def on_lost(self, reason: str) -> None: ...
    def on_proved(self) -> None: ...


class Loader(Protocol):
    """How models come up, for all owners alike."""

    def __call__(self, model: KnownModel, observer: LoadObserver) -> Awaitable[Instance]:
        """A serving instance. Raises CortexError or WorkerLost, and cleans up when cancelled."""

    def wake(self, instance: Instance) -> Awaitable[None]:
        """The sleeping instance serves again. Raises CortexError (it sleeps as before), Damaged or WorkerLost."""


@dataclass(frozen=True, slots=True)
class Reports:
    """The observer that an owner gives to a bring-up: ties what is reported to the attempt it belongs to."""

    happened: Callable[[Input], None]
    progressed: Callable[[str, int, int], None]
    attempt: int

    def on_downloading(self) -> None:
        self.happened(Downloading(self.attempt))

    def on_files_at_hand(self) -> None:
        self.happened(FilesReady(self.attempt))

    def on_progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        self.progressed(stage, done_bytes, total_bytes)

    def on_lost(self, reason: str) -> None:
        self.happened(ModelLost(reason))

    def on_proved(self) -> None:
        self.happened(ProducedTokens())
