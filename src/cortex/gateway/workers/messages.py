"""The messages between workers and the main process. `number` identifies a request of one worker."""

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
    """Base of all messages; encoded by position, as both sides are always the same version."""


# To the main process


class Ready(WorkerMessage, frozen=True):
    """This worker accepts connections."""


class Admit(WorkerMessage, frozen=True):
    """A new request. If it is admitted, it requests a lease at the same time."""

    number: int
    name: str
    """The model's name as the client wrote it."""
    credentials: tuple[tuple[bytes, bytes], ...]
    """The headers that hold the client's key."""
    estimate: Estimate
    need: Need
    prompt: bytes
    """The first bytes of the conversation, for prefix routing."""


class RequestLease(WorkerMessage, frozen=True):
    """Another lease, after the previous one was released."""

    number: int
    excluded: tuple[str, ...]


class CancelLease(WorkerMessage, frozen=True):
    """The client has disconnected: cancels the lease request, and releases a lease that was just granted."""

    number: int


class Release(WorkerMessage, frozen=True):
    """The request has ended at its node."""

    number: int


class ModelGone(WorkerMessage, frozen=True):
    """The node reported that it does not have the model."""

    number: int


class NodeSuspected(WorkerMessage, frozen=True):
    """A request failed at this node."""

    node: str
    reason: str


class Settle(WorkerMessage, frozen=True):
    """The request has ended with this usage. The last message about it."""

    number: int
    usage: Usage | None
    model: str
    node: str


class MetricsSnapshot(WorkerMessage, frozen=True):
    """All metrics of this worker since it started."""

    exposition: bytes


ToMain = Ready | Admit | RequestLease | CancelLease | Release | ModelGone | NodeSuspected | Settle | MetricsSnapshot


# To a worker


class Setup(WorkerMessage, frozen=True):
    """The configuration, at the start and after every reload; the address is used at the start only."""

    config: bytes
    host: str
    port: int


class Admitted(WorkerMessage, frozen=True):
    number: int
    model: str
    origin: Origin
    principal: str


class Rejected(WorkerMessage, frozen=True):
    """The request was not admitted, or got no lease."""

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
    """Admit no more requests; running responses have `grace_s` to end."""

    grace_s: float


ToWorker = Setup | Admitted | Rejected | Granted | Close
