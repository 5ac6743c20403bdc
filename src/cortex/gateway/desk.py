"""Where requests are admitted and get their nodes: the seam between the data path and who decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from cortex.fleet.decision import Origin
from cortex.gateway.envelope import Envelope
from cortex.gateway.http.request import Request
from cortex.gateway.meter import Hold, Meter
from cortex.gateway.state import Dispatcher
from cortex.gateway.tickets import Lease, Need, Ticket
from cortex.wire.errors import CortexError


class Admission(NamedTuple):
    """A request that may go on: what it is for, and who pays."""

    model: str
    origin: Origin
    hold: Hold
    number: int = 0
    """For the desk's own use."""


Admitted = Callable[[Admission | CortexError], None]


class Desk(Protocol):
    """Called on the loop's thread; answers come through callbacks, at once or later."""

    def admit(self, request: Request, envelope: Envelope, need: Need, admitted: Admitted) -> None:
        """Who asks for what, and may they: calls `admitted` exactly once."""

    def ask(self, ticket: Ticket) -> None:
        """Get a lease, or wait for one: the ticket is delivered exactly once."""

    def cancel(self, ticket: Ticket) -> None:
        """The client has left while it waited."""

    def release(self, lease: Lease) -> None:
        """The request has ended at its node, however it did."""

    def suspect(self, node: str, why: str) -> None:
        """A request failed there."""

    def gone(self, lease: Lease) -> None:
        """The node denies having the model."""


class LocalDesk:
    """The desk of the process that owns the dispatcher and the books: everything is answered at once."""

    def __init__(self, dispatcher: Dispatcher, meter: Meter) -> None:
        self._dispatcher = dispatcher
        self.meter = meter
        """Replaced by a reload; requests under way settle with the one that admitted them."""
        self.cancel = dispatcher.cancel
        self.release = dispatcher.release
        self.suspect = dispatcher.suspect
        self.gone = dispatcher.gone

    def admit(self, request: Request, envelope: Envelope, need: Need, admitted: Admitted) -> None:  # noqa: ARG002
        result: Admission | CortexError
        try:
            result = self.judge(
                request,
                envelope.model or "",
                prompt_bytes=len(request.body),
                completion_limit=envelope.completion_limit,
            )
        except CortexError as error:
            result = error
        admitted(result)

    def judge(self, request: Request, name: str, *, prompt_bytes: int, completion_limit: int | None) -> Admission:
        """Admit a request for the model that its client calls `name`. Raises what stands in the way."""
        resolution = self._dispatcher.resolve(name)
        hold = self.meter.admit(
            request, model=resolution.model_id, prompt_bytes=prompt_bytes, completion_limit=completion_limit
        )
        return Admission(resolution.model_id, "background" if resolution.background else "request", hold)

    def ask(self, ticket: Ticket) -> None:
        try:
            self._dispatcher.ask(ticket)
        except CortexError as error:
            ticket.deliver(error)
