"""The desk as a worker sees it: the same questions, asked of the main process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from cortex.gateway.desk import Admission, Admitted
from cortex.gateway.envelope import Envelope
from cortex.gateway.http.request import Request
from cortex.gateway.ledger import Keyring, KeySection
from cortex.gateway.ledger.meter import recognise
from cortex.gateway.meter import ANONYMOUS, Estimate
from cortex.gateway.tickets import Lease, Need, Ticket
from cortex.gateway.workers import messages
from cortex.gateway.workers.messages import Message
from cortex.wire.events import Usage

_CREDENTIALS = (b"authorization", b"x-api-key")


class RemoteLease(Lease):
    """A lease that the main process has counted."""

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


class RemoteHold:
    """A reservation in the main process's ledger."""

    __slots__ = ("_desk", "_number", "principal")

    def __init__(self, desk: RemoteDesk, number: int, principal: str) -> None:
        self._desk = desk
        self._number = number
        self.principal = principal

    def settle(self, usage: Usage | None, *, model: str, node: str, request_id: str) -> None:
        self._desk.settle(messages.Settle(self._number, usage, model, node, request_id))


class RemoteDesk:
    """Owned by the worker's loop. Requests are numbered; each has at most one question open."""

    def __init__(self, send: Callable[[Message], None], keys: Iterable[KeySection]) -> None:
        self._send = send
        self.keyring = Keyring(keys)
        """Replaced by a reload."""
        self._numbers = itertools.count(1)
        self._admitting: dict[int, Admitted] = {}
        self._first: set[int] = set()
        """Admitted, and their first lease asked for along with that."""
        self._tickets: dict[int, Ticket] = {}

    # --- for passages

    def authenticate(self, request: Request) -> str:
        """By the keys that the configuration lists: a stranger is turned away without asking the main process."""
        return recognise(self.keyring, request).name if self.keyring else ANONYMOUS

    def admit(self, request: Request, envelope: Envelope, need: Need, admitted: Admitted) -> None:
        number = next(self._numbers)
        self._admitting[number] = admitted
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

    def ask(self, ticket: Ticket) -> None:
        number = ticket.number
        self._tickets[number] = ticket
        if number in self._first:
            self._first.discard(number)
        else:
            self._send(messages.Ask(number, tuple(ticket.excluded)))

    def cancel(self, ticket: Ticket) -> None:
        if self._tickets.pop(ticket.number, None) is not None:
            self._send(messages.Withdraw(ticket.number))

    def release(self, lease: Lease) -> None:
        assert isinstance(lease, RemoteLease)  # all of a worker's leases come from here
        self._send(messages.Release(lease.number))

    def suspect(self, node: str, why: str) -> None:
        self._send(messages.Suspect(node, why))

    def gone(self, lease: Lease) -> None:
        assert isinstance(lease, RemoteLease)
        self._send(messages.Gone(lease.number))

    def settle(self, settlement: messages.Settle) -> None:
        """For holds: the request is over."""
        self._first.discard(settlement.number)
        self._tickets.pop(settlement.number, None)
        self._send(settlement)

    # --- for the channel

    def admitted(self, message: messages.Admitted) -> None:
        self._first.add(message.number)
        hold = RemoteHold(self, message.number, message.principal)
        self._admitting.pop(message.number)(Admission(message.model, message.origin, hold, message.number))

    def refused(self, message: messages.Refused) -> None:
        admitted = self._admitting.pop(message.number, None)
        if admitted is not None:
            admitted(message.error())
        elif (ticket := self._tickets.pop(message.number, None)) is not None:
            ticket.deliver(message.error())

    def granted(self, message: messages.Granted) -> None:
        ticket = self._tickets.pop(message.number, None)
        if ticket is not None:  # else its client has left, and the main process has been or is being told
            ticket.deliver(RemoteLease(message))
