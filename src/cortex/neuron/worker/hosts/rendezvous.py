"""Where the ranks of one load of a divided model find each other."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal

from cortex.neuron.engine.request import RankSpec
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.model_host import LoadRejected
from cortex.system.tasks import run_once
from cortex.wire.words import os_error_in_words

Backend = Literal["nccl", "sockets"]


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The rendezvous of the ranks of one load. It exists while it is entered, for the time of the load."""

    size: int
    backend: Backend
    device_locks: tuple[str, ...] = ()
    """See `RankSpec`."""
    directory: str = field(
        default_factory=lambda: str(Path(tempfile.gettempdir(), f"neuron-group-{secrets.token_hex(8)}"))
    )

    def rank(self, number: int) -> RankSpec:
        return RankSpec(number, self.size, self.directory, self.backend, self.device_locks)

    def __enter__(self) -> None:
        """Raises LoadRejected."""
        try:
            Path(self.directory).mkdir(mode=0o700)
        except OSError as error:
            message = f"no directory for the ranks of the model: {os_error_in_words(error)}"
            raise LoadRejected(FaultKind.REQUEST, message) from error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # In a task: a load that is cancelled here would leave its ranks in memory.
        removal = asyncio.to_thread(shutil.rmtree, self.directory, ignore_errors=True)
        run_once(removal, f"remove {self.directory}")
