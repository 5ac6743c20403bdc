"""A client's connection, where even what is not HTTP is answered in JSON."""

from __future__ import annotations

import asyncio
import socket

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from cortex.neuron.api import responses
from cortex.wire.errors import CortexError, HeadersTooLarge, MalformedHTTP

BACKLOG = 1024


class Protocol(web.RequestHandler):
    """aiohttp's own, but for the words of a refusal: no plain-text error leaves this program."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # it logs, and raises where an answer is under way
        error: CortexError
        if isinstance(exc, LineTooLong):
            error = HeadersTooLarge("The request line or a header is too long; send less.")
        elif status < 500:
            error = MalformedHTTP("Not a request that can be read safely; send HTTP/1.1.")
        else:
            error = CortexError("Something went wrong inside the node; its log has the details.")
        response = responses.error(error, request.path)
        response.force_close()
        return response


async def accept(runner: web.AppRunner, listener: socket.socket) -> asyncio.Server:
    """Begin to serve on a bound socket. Close the result before `runner.cleanup()`."""
    server = runner.server
    if server is None:
        raise RuntimeError("set the runner up before it accepts")
    loop = asyncio.get_running_loop()

    def connect() -> Protocol:
        return Protocol(server, loop=loop, access_log=None)  # type: ignore[arg-type] # None is what turns it off

    return await loop.create_server(connect, sock=listener, backlog=BACKLOG)
