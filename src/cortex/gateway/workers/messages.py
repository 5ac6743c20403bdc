"""What workers and the main process tell each other. `number` names one request of one worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from cortex.fleet.decision import Origin
from cortex.gateway.dispatch.leases import Need
from cortex.gateway.ledger.limits import Estimate
from cortex.wire.errors import BY_CODE, CortexError
from cortex.wire.events import Usage
from cortex.wire.node import Dialect


class WorkerMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""


# --- to the main process


class Ready(WorkerMessage, frozen=True):
    """This worker accepts connections."""

    process_id: int


class Admit(WorkerMessage, frozen=True):
    """A request has come. Where it is admitted, it asks for a lease at the same time."""

    number: int
    name: str
    """The model as the client calls it."""
    credentials: tuple[tuple[bytes, bytes], ...]
    """The headers that say who asks."""
    estimate: Estimate
    need: Need
    prompt: bytes
    """The start of the conversation."""


class Ask(WorkerMessage, frozen=True):
    """Another lease, after the one before has been given back."""

    number: int
    excluded: tuple[str, ...]


class Withdraw(WorkerMessage, frozen=True):
    """The client has left; no lease is wanted, and one that is on its way goes back."""

    number: int


class Release(WorkerMessage, frozen=True):
    """The request has ended at its node."""

    number: int


class Gone(WorkerMessage, frozen=True):
    """The node denies having the model."""

    number: int


class Suspect(WorkerMessage, frozen=True):
    """A request failed at this node."""

    node: str
    why: str


class Settle(WorkerMessage, frozen=True):
    """The request is over, and this is what it used. The last that is said about it."""

    number: int
    usage: Usage | None
    model: str
    node: str


class MetricsSnapshot(WorkerMessage, frozen=True):
    """All that this worker has counted since it began."""

    exposition: bytes


ToMain = Ready | Admit | Ask | Withdraw | Release | Gone | Suspect | Settle | MetricsSnapshot


# --- to a worker


class Setup(WorkerMessage, frozen=True):
    """The configuration, at the start and after every reload; the address matters at the start only."""

    config: bytes
    host: str
    port: int


class Admitted(WorkerMessage, frozen=True):
    number: int
    model: str
    origin: Origin
    principal: str


class Rejected(WorkerMessage, frozen=True):
    """Not admitted, or no lease."""

    number: int
    code: str
    message: str
    param: str | None
    retry_after_s: float | None
    details: Mapping[str, Any]

    @classmethod
    def of(cls, number: int, error: CortexError) -> Rejected:
        return cls(number, error.code, error.message, error.param, error.retry_after_s, error.details)

    def error(self) -> CortexError:
        kind = BY_CODE.get(self.code, CortexError)
        return kind(self.message, param=self.param, retry_after_s=self.retry_after_s, details=self.details)


class Granted(WorkerMessage, frozen=True):
    number: int
    node: str
    model: str
    dialects: tuple[Dialect, ...]
    has_lifecycle: bool
    has_alternatives: bool
    waited_s: float


class Close(WorkerMessage, frozen=True):
    """Admit nothing more; running answers have `grace_s` to end."""

    grace_s: float


ToWorker = Setup | Admitted | Rejected | Granted | Close
