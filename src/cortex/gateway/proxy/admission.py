"""Admission: the interface between the data path and the dispatcher.

Every process checks in the same order: the key, from the headers alone; then the body; then the key's limits; then the
model's name. No check whose cost depends on the request runs before the key is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from cortex.fleet.decision import Origin
from cortex.gateway.dispatch.dispatcher import Dispatcher
from cortex.gateway.dispatch.leases import Lease, Need, PendingRequest
from cortex.gateway.ledger.keys import KeySection
from cortex.gateway.ledger.limits import Estimate
from cortex.gateway.ledger.meter import LocalReservation, Meter, Reservation
from cortex.gateway.proxy.envelope import Envelope
from cortex.gateway.proxy.redaction import shown_to
from cortex.http.request import Request
from cortex.wire.errors import CortexError


class AdmittedRequest(NamedTuple):
    """A request that passed all checks: its model, and the reservation that it is charged to."""

    model: str
    origin: Origin
    reservation: Reservation
    number: int = 0
    """Identifies the request to the admission controller that admitted it."""
    key: KeySection | None = None
    """The key of its client; None on an open gateway."""


OnAdmitted = Callable[[AdmittedRequest | CortexError], None]


class AdmissionController(Protocol):
    """Admits requests and gives them leases. Called on the loop's thread; callbacks get the results, now or later."""

    def authenticate(self, request: Request) -> str:
        """The principal of a request, from its headers alone. Raises InvalidAPIKey."""

    def admit(self, request: Request, envelope: Envelope, need: Need, on_admitted: OnAdmitted) -> None:
        """Check the key's limits and resolve the model. Calls `on_admitted` exactly once."""

    def ask(self, pending: PendingRequest) -> None:
        """Get a lease, or wait for one. Calls `pending.deliver` exactly once, unless it is cancelled."""

    def cancel(self, pending: PendingRequest) -> None:
        """The client disconnected while its request waited."""

    def release(self, lease: Lease) -> None:
        """The request has ended at its node, in whatever way."""

    def suspect(self, node: str, why: str) -> None:
        """A request to this node failed."""

    def gone(self, lease: Lease) -> None:
        """The node reports that it does not have the model."""


class LocalAdmissionController:
    """Admission in the process that owns the dispatcher and the ledger."""

    def __init__(self, dispatcher: Dispatcher, meter: Meter) -> None:
        self._dispatcher = dispatcher
        self.meter = meter
        """Replaced by a reload; running requests settle with the meter that admitted them."""
        self.cancel = dispatcher.cancel
        self.release = dispatcher.release
        self.suspect = dispatcher.suspect
        self.gone = dispatcher.gone

    def authenticate(self, request: Request) -> str:
        return self.meter.authenticate(request)

    def admit(self, request: Request, envelope: Envelope, need: Need, on_admitted: OnAdmitted) -> None:  # noqa: ARG002
        result: AdmittedRequest | CortexError
        estimate = Estimate(len(request.body), envelope.completion_limit, envelope.num_choices)
        try:
            result, _ = self.authorize(request, envelope.model or "", estimate)
        except CortexError as error:
            result = error
        on_admitted(result)

    def authorize(self, request: Request, name: str, estimate: Estimate) -> tuple[AdmittedRequest, LocalReservation]:
        """Admit a request for the model or alias `name`. Raises the `CortexError` that rejects it."""
        reservation = self.meter.admit(request, estimate)
        try:
            resolution = self._dispatcher.resolve(name)
            reservation.check_model(resolution.model_id)
        except CortexError as error:
            reservation.cancel()
            raise shown_to(reservation.key, error) from error
        origin: Origin = "background" if resolution.background else "request"
        return AdmittedRequest(resolution.model_id, origin, reservation, key=reservation.key), reservation

    def ask(self, pending: PendingRequest) -> None:
        try:
            self._dispatcher.ask(pending)
        except CortexError as error:
            pending.deliver(error)
