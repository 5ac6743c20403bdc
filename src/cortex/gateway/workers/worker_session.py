"""The main process's side of one worker: the worker's requests, their leases and their reservations."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from cortex.gateway.dispatch.leases import NO_NODES, Lease, Need, PendingRequest
from cortex.gateway.ledger.meter import LocalReservation
from cortex.gateway.proxy.admission import AdmittedRequest, LocalAdmissionController
from cortex.gateway.workers.messages import (
    Admit,
    Admitted,
    CancelLease,
    Granted,
    MetricsSnapshot,
    ModelGone,
    NodeSuspected,
    Ready,
    Rejected,
    Release,
    RequestLease,
    Settle,
    ToMain,
    WorkerMessage,
)
from cortex.http.request import Request
from cortex.ipc.channel import LoopChannel
from cortex.wire.errors import CortexError
from cortex.wire.events import Usage

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _WorkerRequest:
    admitted: AdmittedRequest
    reservation: LocalReservation
    need: Need
    prompt: bytes
    pending: PendingRequest | None = None
    lease: Lease | None = None


class WorkerSession:
    """Executes a worker's messages on the admission controller. When the channel closes, everything that the worker
    held is released and `on_ended` is called."""

    def __init__(
        self,
        admission: LocalAdmissionController,
        clock: Callable[[], float],
        ready: asyncio.Event,
        on_ended: Callable[[WorkerSession], None],
    ) -> None:
        """Sets `ready` when the worker accepts connections."""
        self.channel: LoopChannel[ToMain] = LoopChannel(ToMain, self._receive, self._channel_closed)
        self.metrics = b""
        """The worker's latest metrics."""
        self._admission = admission
        self._clock = clock
        self._ready = ready
        self._on_ended = on_ended
        self._worker_requests: dict[int, _WorkerRequest] = {}

    def send(self, message: WorkerMessage) -> None:
        self.channel.send(message)

    def _receive(self, message: ToMain) -> None:
        match message:
            case Admit():
                self._admit(message)
            case Release(number=number):
                self._release(self._worker_requests[number])
            case Settle():
                self._settle(message.number, message.usage, message.model, message.node)
            case RequestLease(number=number, excluded=excluded):
                self._request_lease(number, self._worker_requests[number], frozenset(excluded))
            case CancelLease(number=number):
                self._cancel(self._worker_requests[number])
            case ModelGone(number=number):
                if (lease := self._worker_requests[number].lease) is not None:
                    self._admission.gone(lease)
            case NodeSuspected(node=node, reason=reason):
                self._admission.suspect(node, reason)
            case MetricsSnapshot(exposition=exposition):
                self.metrics = exposition
            case Ready():
                self._ready.set()

    def _admit(self, message: Admit) -> None:
        request = Request(b"POST", b"", b"", message.credentials, b"", "")
        try:
            admitted, reservation = self._admission.authorize(request, message.name, message.estimate)
        except CortexError as error:
            self.send(Rejected.of(message.number, error))
            return
        worker_request = self._worker_requests[message.number] = _WorkerRequest(
            admitted, reservation, message.need, message.prompt
        )
        self.send(Admitted(message.number, admitted.model, admitted.origin, admitted.reservation.principal))
        self._request_lease(message.number, worker_request, NO_NODES)

    def _request_lease(self, number: int, worker_request: _WorkerRequest, excluded: frozenset[str]) -> None:
        worker_request.pending = PendingRequest(
            worker_request.admitted.model,
            lambda: worker_request.prompt,
            partial(self._deliver, number, worker_request),
            self._clock(),
            origin=worker_request.admitted.origin,
            need=worker_request.need,
            excluded=excluded,
        )
        self._admission.ask(worker_request.pending)

    def _deliver(self, number: int, worker_request: _WorkerRequest, result: Lease | CortexError) -> None:
        worker_request.pending = None
        if isinstance(result, CortexError):
            self.send(Rejected.of(number, result))
            return
        worker_request.lease = result
        self.send(
            Granted(
                number,
                result.node,
                result.model,
                result.dialects,
                result.has_lifecycle,
                result.has_alternatives,
                result.waited_s,
            )
        )

    def _cancel(self, worker_request: _WorkerRequest) -> None:
        pending, worker_request.pending = worker_request.pending, None
        if pending is not None:
            self._admission.cancel(pending)
        self._release(worker_request)

    def _release(self, worker_request: _WorkerRequest) -> None:
        lease, worker_request.lease = worker_request.lease, None
        if lease is not None:
            self._admission.release(lease)

    def _settle(self, number: int, usage: Usage | None, model: str, node: str) -> None:
        worker_request = self._worker_requests.pop(number)
        self._cancel(worker_request)
        worker_request.reservation.settle(usage, model=model, node=node)

    def _channel_closed(self, reason: str) -> None:
        if self._worker_requests:
            log.error("a worker ended with %d requests running: %s", len(self._worker_requests), reason)
        for worker_request in self._worker_requests.values():
            lease, model = worker_request.lease, worker_request.admitted.model
            self._cancel(worker_request)
            if lease is not None:  # a node worked on it, and the worker can no longer ask for its usage
                worker_request.reservation.settle_in_full(model=model, node=lease.node)
            else:
                worker_request.reservation.settle(None, model=model, node="")
        self._worker_requests.clear()
        self._on_ended(self)
