"""Requests with keys, as a gateway's meter admits and settles them, on a clock of the test."""

from __future__ import annotations

from cortex.gateway.ledger.keys import Keyring, NewKey
from cortex.gateway.ledger.ledger import Ledger
from cortex.gateway.ledger.meter import KeyedMeter, Meter, Reservation
from cortex.gateway.ledger.store import open_store
from cortex.http.request import Request
from cortex.wire.events import Usage
from cortex.wire.request_summary import RequestSummary

NOW = 1_700_000_040.0


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def limited(completion_limit: int | None) -> RequestSummary:
    return RequestSummary("m", stream=False, completion_limit=completion_limit, num_choices=1)


def request(*headers: tuple[bytes, bytes]) -> Request:
    return Request(b"POST", b"/v1/chat/completions", b"", headers, b"{}", "127.0.0.1")


def bearer(key: NewKey) -> Request:
    return request((b"authorization", b"Bearer " + key.text.encode()))


def admit(meter: Meter, key: NewKey, *, limit: int | None = 100) -> Reservation:
    """A request with a prompt of about 100 tokens, whose response ends at `limit` or, without one, at its budget."""
    return meter.admit(meter.key(bearer(key)), 400, limited(limit), lambda _: None if limit is None else 100 + limit)


def settle(reservation: Reservation, prompt: int, completion: int) -> None:
    used = Usage(prompt_tokens=prompt, completion_tokens=completion)
    reservation.settle(used, model="m", node="n")


async def opened(database: str, *keys: NewKey, clock: Clock | None = None) -> tuple[Ledger, Meter]:
    clock = clock or Clock()
    keyring = Keyring(key.section for key in keys)
    ledger = Ledger(open_store(database), keyring, flush_s=60, clock=clock, monotonic=clock)
    await ledger.start()
    return ledger, KeyedMeter(ledger)
