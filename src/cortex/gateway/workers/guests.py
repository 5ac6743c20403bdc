"""The main process's side of one worker: its requests, their leases and their places in budgets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from cortex.gateway.desk import Admission, LocalDesk
from cortex.gateway.http.request import Request
from cortex.gateway.meter import Reservation
from cortex.gateway.tickets import NOBODY, Lease, Need, Ticket
from cortex.gateway.workers.channel import Channel
from cortex.gateway.workers.messages import (
    Admit,
    Admitted,
    Ask,
    Counts,
    Gone,
    Granted,
    Message,
    Ready,
    Refused,
    Release,
    Settle,
    Suspect,
    ToMain,
    Withdraw,
)
from cortex.wire.errors import CortexError
from cortex.wire.events import Usage

_decoder = msgspec.msgpack.Decoder[ToMain](ToMain)


@dataclass(slots=True)
class _Guest:
    admission: Admission
    reservation: Reservation
    need: Need
    prompt: bytes
    ticket: Ticket | None = None
    lease: Lease | None = None


class Guests:
    """Does at the desk what a worker asks for. When the worker is gone, nothing of it is left there."""

    def __init__(
        self,
        desk: LocalDesk,
        clock: Callable[[], float],
        came: Callable[[Guests], None],
        lost: Callable[[Guests], None],
    ) -> None:
        self.channel = Channel(_decoder, self._receive, came=lambda: came(self), lost=self._worker_lost)
        self.process_id: int | None = None
        self.ready = asyncio.Event()
        self.counts = b""
        """The worker's latest metrics."""
        self._desk = desk
        self._clock = clock
        self._lost = lost
        self._guests: dict[int, _Guest] = {}

    def send(self, message: Message) -> None:
        self.channel.send(message)

    def _receive(self, message: ToMain) -> None:
        match message:
            case Admit():
                self._admit(message)
            case Release(number=number):
                self._release(self._guests[number])
            case Settle():
                self._settle(message.number, message.usage, message.model, message.node, message.request_id)
            case Ask(number=number, excluded=excluded):
                self._ask(number, self._guests[number], frozenset(excluded))
            case Withdraw(number=number):
                self._withdraw(self._guests[number])
            case Gone(number=number):
                if (lease := self._guests[number].lease) is not None:
                    self._desk.gone(lease)
            case Suspect(node=node, why=why):
                self._desk.suspect(node, why)
            case Counts(exposition=exposition):
                self.counts = exposition
            case Ready(process_id=process_id):
                self.process_id = process_id
                self.ready.set()

    def _admit(self, asked: Admit) -> None:
        request = Request(b"POST", b"", b"", asked.credentials, b"", "")
        try:
            admission, reservation = self._desk.judge(request, asked.name, asked.estimate)
        except CortexError as error:
            self.send(Refused.of(asked.number, error))
            return
        guest = self._guests[asked.number] = _Guest(admission, reservation, asked.need, asked.prompt)
        self.send(Admitted(asked.number, admission.model, admission.origin, admission.hold.principal))
        self._ask(asked.number, guest, NOBODY)

    def _ask(self, number: int, guest: _Guest, excluded: frozenset[str]) -> None:
        guest.ticket = Ticket(
            guest.admission.model,
            lambda: guest.prompt,
            partial(self._deliver, number, guest),
            self._clock(),
            origin=guest.admission.origin,
            need=guest.need,
            excluded=excluded,
        )
        self._desk.ask(guest.ticket)

    def _deliver(self, number: int, guest: _Guest, result: Lease | CortexError) -> None:
        guest.ticket = None
        if isinstance(result, CortexError):
            self.send(Refused.of(number, result))
            return
        guest.lease = result
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

    def _withdraw(self, guest: _Guest) -> None:
        ticket, guest.ticket = guest.ticket, None
        if ticket is not None:
            self._desk.cancel(ticket)
        self._release(guest)

    def _release(self, guest: _Guest) -> None:
        lease, guest.lease = guest.lease, None
        if lease is not None:
            self._desk.release(lease)

    def _settle(self, number: int, usage: Usage | None, model: str, node: str, request_id: str) -> None:
        guest = self._guests.pop(number)
        self._withdraw(guest)
        guest.reservation.settle(usage, model=model, node=node, request_id=request_id)

    def _worker_lost(self) -> None:
        for guest in self._guests.values():
            lease, model = guest.lease, guest.admission.model
            self._withdraw(guest)
            if lease is not None:  # a node was at work for it, and nobody is left who could ask how much it did
                guest.reservation.settle_in_full(model=model, node=lease.node)
            else:
                guest.reservation.settle(None, model=model, node="", request_id="")
        self._guests.clear()
        self._lost(self)
