"""The admission controller of a worker, which asks the main process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from cortex.gateway.dispatch.leases import Lease, Need, PendingRequest
from cortex.gateway.ledger.keys import Keyring, KeySection
from cortex.gateway.ledger.limits import Estimate
from cortex.gateway.ledger.meter import ANONYMOUS, recognise
from cortex.gateway.proxy.admission import AdmittedRequest, OnAdmitted
from cortex.gateway.proxy.envelope import Envelope
from cortex.gateway.workers import messages
from cortex.gateway.workers.messages import WorkerMessage
from cortex.http.request import Request
from cortex.wire.events import Usage

_CREDENTIALS = (b"authorization", b"x-api-key")


class RemoteLease(Lease):
    """A lease granted by the main process."""

    __slots__ = ("number",)

    def __init__(self, granted: messages.Granted) -> None:
        super().__init__(
            granted.node,
            granted.model,
            granted.dialects,
            has_lifecycle=granted.has_lifecycle,
            has_alternatives=granted.has_alternatives,
            waited_s=granted.waited_s,
        )
        self.number = granted.number


class RemoteReservation:
    """A reservation in the main process's ledger."""

    __slots__ = ("_admission", "_number", "principal")

    def __init__(self, admission: RemoteAdmissionController, number: int, principal: str) -> None:
        self._admission = admission
        self._number = number
        self.principal = principal

    def settle(self, usage: Usage | None, *, model: str, node: str) -> None:
        self._admission.settle(messages.Settle(self._number, usage, model, node))


class RemoteAdmissionController:
    """Owned by the worker's loop. Each request has a number, and at most one message without a reply."""

    def __init__(self, send: Callable[[WorkerMessage], None], keys: Iterable[KeySection]) -> None:
        self._send = send
        self.keyring = Keyring(keys)
        """Replaced by a reload."""
        self._numbers = itertools.count(1)
        self._admitting: dict[int, OnAdmitted] = {}
        self._first_lease: set[int] = set()
        """Requests that were admitted, and whose first lease was requested by `Admit`."""
        self._pending: dict[int, PendingRequest] = {}

    # Called by proxy requests

    def authenticate(self, request: Request) -> str:
        """Checks the key against the configuration, so that invalid keys never reach the main process."""
        return recognise(self.keyring, request).name if self.keyring else ANONYMOUS

    def admit(self, request: Request, envelope: Envelope, need: Need, on_admitted: OnAdmitted) -> None:
        number = next(self._numbers)
        self._admitting[number] = on_admitted
        self._send(
            messages.Admit(
                number,
                envelope.model or "",
                tuple(pair for pair in request.headers if pair[0] in _CREDENTIALS),
                Estimate(len(request.body), envelope.completion_limit, envelope.num_choices),
                need,
                envelope.leading_bytes(),
            )
        )

    def ask(self, pending: PendingRequest) -> None:
        number = pending.number
        self._pending[number] = pending
        if number in self._first_lease:
            self._first_lease.discard(number)
        else:
            self._send(messages.RequestLease(number, tuple(pending.excluded)))

    def cancel(self, pending: PendingRequest) -> None:
        if self._pending.pop(pending.number, None) is not None:
            self._send(messages.CancelLease(pending.number))

    def release(self, lease: Lease) -> None:
        assert isinstance(lease, RemoteLease)  # a worker has no other leases
        self._send(messages.Release(lease.number))

    def suspect(self, node: str, why: str) -> None:
        self._send(messages.NodeSuspected(node, why))

    def gone(self, lease: Lease) -> None:
        assert isinstance(lease, RemoteLease)
        self._send(messages.ModelGone(lease.number))

    def settle(self, settlement: messages.Settle) -> None:
        """Called by `RemoteHold` when the request has ended."""
        self._first_lease.discard(settlement.number)
        self._pending.pop(settlement.number, None)
        self._send(settlement)

    # Called for messages of the main process

    def on_admitted(self, message: messages.Admitted) -> None:
        self._first_lease.add(message.number)
        reservation = RemoteReservation(self, message.number, message.principal)
        self._admitting.pop(message.number)(AdmittedRequest(message.model, message.origin, reservation, message.number))

    def rejected(self, message: messages.Rejected) -> None:
        on_admitted = self._admitting.pop(message.number, None)
        if on_admitted is not None:
            on_admitted(message.error())
        elif (pending := self._pending.pop(message.number, None)) is not None:
            pending.deliver(message.error())

    def granted(self, message: messages.Granted) -> None:
        pending = self._pending.pop(message.number, None)
        if pending is not None:  # else its client disconnected, and `cancel` has reported it
            pending.deliver(RemoteLease(message))
