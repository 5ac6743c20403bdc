"""The main process's side of one worker: its requests, their leases and their places in budgets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from cortex.gateway.dispatch.leases import NOBODY, Lease, Need, PendingRequest
from cortex.gateway.ledger.meter import LocalReservation
from cortex.gateway.proxy.admission import AdmittedRequest, LocalAdmissionController
from cortex.gateway.workers.messages import (
    Admit,
    Admitted,
    Ask,
    Gone,
    Granted,
    MetricsSnapshot,
    Ready,
    Rejected,
    Release,
    Settle,
    Suspect,
    ToMain,
    Withdraw,
    WorkerMessage,
)
from cortex.http.request import Request
from cortex.ipc.message_channel import MessageChannel
from cortex.wire.errors import CortexError
from cortex.wire.events import Usage

_decoder = msgspec.msgpack.Decoder[ToMain](ToMain)


@dataclass(slots=True)
class _WorkerRequest:
    admitted: AdmittedRequest
    reservation: LocalReservation
    need: Need
    prompt: bytes
    pending: PendingRequest | None = None
    lease: Lease | None = None


class WorkerSession:
    """Does at the desk what a worker asks for. When the worker is gone, nothing of it is left there."""

    def __init__(
        self,
        admission: LocalAdmissionController,
        clock: Callable[[], float],
        came: Callable[[WorkerSession], None],
        lost: Callable[[WorkerSession], None],
    ) -> None:
        self.channel = MessageChannel(_decoder, self._receive, came=lambda: came(self), lost=self._worker_lost)
        self.process_id: int | None = None
        self.ready = asyncio.Event()
        self.metrics = b""
        """The worker's latest metrics."""
        self._admission = admission
        self._clock = clock
        self._lost = lost
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
            case Ask(number=number, excluded=excluded):
                self._ask(number, self._worker_requests[number], frozenset(excluded))
            case Withdraw(number=number):
                self._withdraw(self._worker_requests[number])
            case Gone(number=number):
                if (lease := self._worker_requests[number].lease) is not None:
                    self._admission.gone(lease)
            case Suspect(node=node, why=why):
                self._admission.suspect(node, why)
            case MetricsSnapshot(exposition=exposition):
                self.metrics = exposition
            case Ready(process_id=process_id):
                self.process_id = process_id
                self.ready.set()

    def _admit(self, asked: Admit) -> None:
        request = Request(b"POST", b"", b"", asked.credentials, b"", "")
        try:
            admitted, reservation = self._admission.authorize(request, asked.name, asked.estimate)
        except CortexError as error:
            self.send(Rejected.of(asked.number, error))
            return
        worker_request = self._worker_requests[asked.number] = _WorkerRequest(
            admitted, reservation, asked.need, asked.prompt
        )
        self.send(Admitted(asked.number, admitted.model, admitted.origin, admitted.reservation.principal))
        self._ask(asked.number, worker_request, NOBODY)

    def _ask(self, number: int, worker_request: _WorkerRequest, excluded: frozenset[str]) -> None:
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

    def _withdraw(self, worker_request: _WorkerRequest) -> None:
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
        self._withdraw(worker_request)
        worker_request.reservation.settle(usage, model=model, node=node)

    def _worker_lost(self) -> None:
        for worker_request in self._worker_requests.values():
            lease, model = worker_request.lease, worker_request.admitted.model
            self._withdraw(worker_request)
            if lease is not None:  # a node was at work for it, and nobody is left who could ask how much it did
                worker_request.reservation.settle_in_full(model=model, node=lease.node)
            else:
                worker_request.reservation.settle(None, model=model, node="")
        self._worker_requests.clear()
        self._lost(self)
