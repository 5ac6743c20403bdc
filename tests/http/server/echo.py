"""A handler that responds with the request, and requests for it."""

from __future__ import annotations

from cortex.http.server.exchange import Exchange


def echo(exchange: Exchange) -> None:
    request = exchange.request
    echo = b"%b %b?%b %b" % (request.method, request.path, request.query, request.body)
    exchange.respond(200, ((b"content-type", b"text/plain"),), echo)


GET = b"GET /a?b=c HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
