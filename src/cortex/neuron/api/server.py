"""The daemon: binds the listener, starts the node, serves its API and shuts down gracefully."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from cortex.neuron.api import app, responses
from cortex.neuron.api.drain_gate import DrainGate
from cortex.neuron.api.log_context import common_fields
from cortex.neuron.config import NeuronConfig
from cortex.neuron.node.node import Node
from cortex.settings import Listen
from cortex.telemetry import Tracer, logs, open_tracer
from cortex.wire.errors import CortexError, HeadersTooLarge, MalformedHTTP

log = logging.getLogger(__name__)

_BACKLOG = 1024
_FLUSH_S = 2.0
"""How long responses that the node has ended may take to reach their clients."""


class CannotListen(Exception):
    """The address cannot be bound; the message says what to do."""


class ClientConnection(web.RequestHandler):
    """aiohttp's handler, but its own errors are JSON too: no plain-text error leaves this program."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # logs, and raises if a response has been started
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


def bind(address: Listen) -> socket.socket:
    """A listening socket. Raises `CannotListen`."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address.host, address.port))
        listener.listen(_BACKLOG)
    except OSError as problem:
        listener.close()
        if problem.errno == errno.EADDRINUSE:
            raise CannotListen(f"port {address.port} is in use; stop what runs there or set another `port`") from None
        raise CannotListen(f"cannot listen on {address}: {problem.strerror or problem}; correct `listen`") from None
    listener.setblocking(False)
    return listener


async def accept(runner: web.AppRunner, listener: socket.socket) -> asyncio.Server:
    """Starts to serve on a bound socket. Close the result before `runner.cleanup()`."""
    server = runner.server
    if server is None:
        raise RuntimeError("set the runner up before it accepts")
    loop = asyncio.get_running_loop()

    def connect() -> ClientConnection:
        return ClientConnection(server, loop=loop, access_log=None)  # type: ignore[arg-type] # None turns it off

    return await loop.create_server(connect, sock=listener, backlog=_BACKLOG)


async def serve(config: NeuronConfig, *, stop: asyncio.Event | None = None) -> None:
    """Runs the node until SIGTERM, SIGINT or `stop`. Raises `SettingsError` or `CannotListen` before anything is
    started.

    Shutdown ends queued requests at once and gives running ones `drain_s`. A second signal ends the process, and its
    workers, immediately.
    """
    logs.configure(config.log_format, config.log_level, common_fields)
    stop = stop or asyncio.Event()
    tracer = open_tracer(config.telemetry, "neuron")
    loop = asyncio.get_running_loop()
    listener = bind(config.address)
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        node = await Node.start(config)
        if node.discovery.driver_problem is not None:
            log.warning("%s", node.discovery.driver_problem)
        try:
            await _serve_node(node, config, listener, tracer, stop)
        finally:
            await node.close()
    finally:
        await asyncio.to_thread(tracer.close)
        listener.close()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _serve_node(
    node: Node, config: NeuronConfig, listener: socket.socket, tracer: Tracer, stop: asyncio.Event
) -> None:
    drain_gate = DrainGate()
    application = app.build(
        node,
        drain_gate,
        keepalive_s=config.keepalive_s,
        max_body_bytes=config.max_body_mb * 1024 * 1024,
        strip_billing_header=config.strip_billing_header,
        tracer=tracer,
    )
    # Cancelling the handler of a disconnected client is what frees its slot, in every phase.
    runner = web.AppRunner(
        application, handler_cancellation=True, access_log=None, handle_signals=False, shutdown_timeout=_FLUSH_S
    )
    await runner.setup()
    accepting = await accept(runner, listener)
    try:
        log.info("listening on %s", _address(listener))
        await stop.wait()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        log.info("shutting down: draining %d requests, up to %.0f s", drain_gate.num_requests, config.drain_s)
        drain_gate.close()
        await node.close()
        await drain_gate.drained(_FLUSH_S)
    finally:
        accepting.close()
        await runner.cleanup()


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
