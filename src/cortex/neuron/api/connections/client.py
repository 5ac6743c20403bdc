"""One connection of a client: aiohttp's, with errors in JSON and a deadline for the head of each request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.typedefs import Handler

from cortex.neuron.api import responses
from cortex.neuron.api.connections.raw_response import raw_error
from cortex.wire.errors import CortexError, HeadersTooLarge, MalformedHTTP, RequestTimeout

log = logging.getLogger(__name__)


@web.middleware
async def end_of_head(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Notifies the connection that the head of a request has arrived. It must be the first middleware."""
    if isinstance(request.protocol, ConnectionHandler):
        request.protocol.begin(request)
    return await handler(request)


class ConnectionHandler(web.RequestHandler):
    """aiohttp's handler, but its own errors are JSON too: no plain-text error leaves this program.

    The deadline begins with the connection, later with the first byte of a head, and further bytes do not postpone it.
    aiohttp has none: it would wait an hour for the rest.
    """

    __slots__ = ("_content", "_deadline", "_head_s", "_is_serving", "_on_lost")

    def __init__(self, server: web.Server, head_s: float, on_lost: Callable[[], None]) -> None:
        """The head of a request must arrive within `head_s`. `on_lost` is called when the connection has ended."""
        super().__init__(server, loop=asyncio.get_running_loop(), access_log=None)  # type: ignore[arg-type] # None turns it off
        self._on_lost = on_lost
        self._head_s = head_s
        self._deadline: asyncio.TimerHandle | None = None
        self._is_serving = False
        """Whether a request is being responded to."""
        self._content: StreamReader | None = None
        """The body of the latest request, which may arrive after the response."""

    def begin(self, request: web.BaseRequest) -> None:
        """The head of `request` has arrived."""
        self._cancel_deadline()
        self._is_serving = True
        self._content = request.content

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._begin_deadline()

    def data_received(self, data: bytes) -> None:
        is_body = self._content is not None and not self._content.is_eof()
        if data and not self._is_serving and not is_body and self._deadline is None:
            self._begin_deadline()
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._cancel_deadline()
        super().connection_lost(exc)
        self._on_lost()

    # Called by aiohttp

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._is_serving = False

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        self._cancel_deadline()  # what arrived is no request, and this response ends the connection
        if status >= 500:
            super().handle_error(request, status, exc, message)  # logs, and raises if a response has been started
        else:  # what clients send is not worth a traceback each
            log.debug("rejected a malformed request from %s: %s", request.remote, exc)
            if request.writer.output_size > 0:
                raise ConnectionError("a response has been started already")
        error: CortexError
        if isinstance(exc, LineTooLong):
            error = HeadersTooLarge("The request line or a header is too long; send less.")
        elif status < 500:
            error = MalformedHTTP("The request is not valid HTTP/1.1; check the client.")
        else:
            error = CortexError(responses.INTERNAL_ERROR)
        response = responses.error(error, request)
        response.force_close()
        return response

    def _begin_deadline(self) -> None:
        self._deadline = asyncio.get_running_loop().call_later(self._head_s, self._expire)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        log.debug("closed a connection whose request did not arrive within %g s", self._head_s)
        if transport.get_write_buffer_size():
            transport.abort()  # the client does not read either
            return
        transport.write(raw_error(RequestTimeout("The request did not arrive in time; send it again, without pauses.")))
        self.force_close()
