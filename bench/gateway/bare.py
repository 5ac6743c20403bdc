"""The data path alone, relaying to one upstream: what the gateway's own work is measured against.

Usage: bare.py ORIGIN PORT
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

from cortex.http.observer import Keepalive, ObservedRelay, Outcome
from cortex.http.relay import Relay
from cortex.http.request import Headers
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response, Server
from cortex.http.ticker import Ticker
from cortex.http.upstream.faults import UpstreamFault
from cortex.http.upstream.pool import Pool
from cortex.wire.errors import CortexError


class PassiveObserver:
    """Passes everything on."""

    def on_head(self, relay: ObservedRelay, status: int, headers: Headers) -> bool:  # noqa: ARG002
        return True

    def on_first_data(self, relay: ObservedRelay) -> None:
        pass

    def on_fault(self, relay: ObservedRelay, fault: UpstreamFault) -> None:
        relay.reject(502, (), str(fault).encode(), b"")

    def late_response(self, relay: ObservedRelay, status: int, body: bytes) -> bytes:  # noqa: ARG002
        return body

    def interruption(self, relay: ObservedRelay, fault: UpstreamFault) -> bytes:  # noqa: ARG002
        return b"data: interrupted\n\n"

    def on_done(self, relay: ObservedRelay, outcome: Outcome) -> None:
        pass


def reject(error: CortexError, path: bytes) -> Response:  # noqa: ARG001
    return Response(error.status, (), str(error).encode())


async def main(origin: str, port: int) -> None:
    ticker = Ticker(asyncio.get_running_loop())
    pool = Pool(origin, ticker)
    keepalive = Keepalive(b": keepalive\n\n", 1.0)
    observer = PassiveObserver()

    def handler(exchange: Exchange) -> None:
        request = exchange.request
        is_stream = b'"stream":true' in request.body
        relay = Relay(exchange, observer, ticker, keepalive=keepalive if is_stream else None)
        relay.send(pool, request.method, request.path, request.headers, request.body)

    await Server(handler, reject, ticker).listen("127.0.0.1", port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2])))
