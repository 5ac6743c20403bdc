"""Forwards a request that is not inference to the main process, unchanged."""

from __future__ import annotations

from cortex.gateway.proxy.routes import error_response, family_of
from cortex.http.relay import Outcome, Relay
from cortex.http.request import Headers
from cortex.http.server.exchange import Exchange
from cortex.http.ticker import Ticker
from cortex.http.upstream.faults import UpstreamFault
from cortex.http.upstream.pool import Pool
from cortex.wire.errors import UpstreamUnavailable

SILENCE_S = 3600.0
"""Timeout between bytes: a load by an operator may take this long, and an event stream may be silent this long."""


class Forward:
    """One forwarded request; the observer of its relay."""

    def __init__(self, exchange: Exchange, pool: Pool, ticker: Ticker) -> None:
        request = exchange.request
        relay = Relay(exchange, self, ticker)
        target = request.path + (b"?" + request.query if request.query else b"")
        # The exchange itself omits the body of a response to HEAD.
        method = b"GET" if request.method == b"HEAD" else request.method
        relay.send(pool, method, target, request.headers, request.body, silence_s=SILENCE_S)

    def on_head(self, relay: Relay, status: int, headers: Headers) -> bool:  # noqa: ARG002
        return True

    def on_first_data(self, relay: Relay) -> None:
        """Nothing is measured here."""

    def on_fault(self, relay: Relay, fault: UpstreamFault) -> None:  # noqa: ARG002
        error = UpstreamUnavailable("The gateway's main process does not respond; try again in a moment.")
        relay.reject(*error_response(error, family_of(relay.exchange.request.path)), b"")

    def late_response(self, relay: Relay, status: int, body: bytes) -> bytes:  # noqa: ARG002
        return b""

    def interruption(self, relay: Relay, fault: UpstreamFault) -> bytes:  # noqa: ARG002
        return b""

    def on_done(self, relay: Relay, outcome: Outcome) -> None:
        """The main process accounts for it."""
