"""Where requests are admitted and get their nodes: the seam between the data path and the dispatcher.

The order of checks is the same in every process: the key first, from the headers alone; then the body; then the key's
limits; and only then the model's name. What costs grows with what the caller has proved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from cortex.fleet.decision import Origin
from cortex.gateway.dispatch.dispatcher import Dispatcher
from cortex.gateway.dispatch.leases import Lease, Need, PendingRequest
from cortex.gateway.ledger.limits import Estimate
from cortex.gateway.ledger.meter import LocalReservation, Meter, Reservation
from cortex.gateway.proxy.envelope import Envelope
from cortex.http.request import Request
from cortex.wire.errors import CortexError


class AdmittedRequest(NamedTuple):
    """A request that may go on: what it is for, and who pays."""

    model: str
    origin: Origin
    reservation: Reservation
    number: int = 0
    """For the desk's own use."""


OnAdmitted = Callable[[AdmittedRequest | CortexError], None]


class AdmissionController(Protocol):
    """Called on the loop's thread; answers come through callbacks, at once or later."""

    def authenticate(self, request: Request) -> str:
        """The principal of a request, from its headers alone. Raises InvalidAPIKey."""

    def admit(self, request: Request, envelope: Envelope, need: Need, on_admitted: OnAdmitted) -> None:
        """Check the caller's limits and resolve the model: calls `on_admitted` exactly once."""

    def ask(self, pending: PendingRequest) -> None:
        """Get a lease, or wait for one: the ticket is delivered exactly once."""

    def cancel(self, pending: PendingRequest) -> None:
        """The client has left while it waited."""

    def release(self, lease: Lease) -> None:
        """The request has ended at its node, however it did."""

    def suspect(self, node: str, why: str) -> None:
        """A request failed there."""

    def gone(self, lease: Lease) -> None:
        """The node denies having the model."""


class LocalAdmissionController:
    """The desk of the process that owns the dispatcher and the ledger: everything is answered at once."""

    def __init__(self, dispatcher: Dispatcher, meter: Meter) -> None:
        self._dispatcher = dispatcher
        self.meter = meter
        """Replaced by a reload; requests under way settle with the one that admitted them."""
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
        """Admit a request for the model that its client calls `name`. Raises what stands in the way."""
        reservation = self.meter.admit(request, estimate)
        try:
            resolution = self._dispatcher.resolve(name)
            reservation.check_model(resolution.model_id)
        except CortexError:
            reservation.cancel()
            raise
        return AdmittedRequest(
            resolution.model_id, "background" if resolution.background else "request", reservation
        ), reservation

    def ask(self, pending: PendingRequest) -> None:
        try:
            self._dispatcher.ask(pending)
        except CortexError as error:
            pending.deliver(error)
