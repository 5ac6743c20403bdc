"""The daemon: binds the listener, starts the node, serves its API and shuts down gracefully. The API gives every
request an id, errors in its dialect and a log line."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import re
import signal
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST

from cortex.http.limits import ClientLimits
from cortex.http.request import Request, loggable
from cortex.http.routing import Match, Router, in_memory
from cortex.http.server import listener
from cortex.http.server.exchange import Exchange
from cortex.http.server.parser import Spooled
from cortex.http.server.server import Response, Server
from cortex.http.ticker import Ticker
from cortex.http.tls import CHECK_FILES_S, ServerCertificate
from cortex.neuron.api import responses
from cortex.neuron.api.access import NodeAccess, NodeKeys, read_keys
from cortex.neuron.api.calls import ApiCall, Handler, Route
from cortex.neuron.api.drain_gate import DrainGate
from cortex.neuron.api.inference.keep_alive import KeepAliveUnloads
from cortex.neuron.api.inference.opaque import OpaqueRoutes
from cortex.neuron.api.inference.pooling import PoolingRoutes
from cortex.neuron.api.inference.routes import Inference
from cortex.neuron.api.inference.usage import UsageRecords
from cortex.neuron.api.log_context import common_fields, request_id, stream_failure
from cortex.neuron.api.metrics import Metrics
from cortex.neuron.api.routes.control import Control
from cortex.neuron.api.routes.models import ModelRoutes
from cortex.neuron.api.routes.ollama import OllamaRoutes
from cortex.neuron.api.routes.tokens import Tokens
from cortex.neuron.api.routes.transfers import KvBlocks, SharedFiles
from cortex.neuron.config import NeuronConfig
from cortex.neuron.config import load as load_config
from cortex.neuron.node.node import Node
from cortex.parsing.parser import BodyParser
from cortex.settings import Listen, SettingsError, Stamp, stamp
from cortex.system import open_files
from cortex.system.service_manager import READY, STOPPING, ServiceManager
from cortex.system.tasks import Supervisor
from cortex.telemetry import logs
from cortex.telemetry.spans import Tracer
from cortex.telemetry.tracing import NoTracer, open_tracer
from cortex.wire.dialects.registry import ROUTES
from cortex.wire.words import duration, plural

log = logging.getLogger(__name__)

REQUEST_ID_HEADER = b"x-request-id"
_REQUEST_ID = re.compile(rb"[\w.:/+=-]{1,128}", re.ASCII)

_BUFFERED_BYTES = 1 << 30
"""Minimum limit for request bodies in memory, of all connections together."""
_FLUSH_S = 2.0
"""How long responses that the node has ended may take to reach their clients."""


class NodeApi:
    """The server of a node's API: one task for each request, cancelled when its client disconnects."""

    def __init__(
        self,
        backend: Node,
        drain_gate: DrainGate,
        *,
        keepalive_s: float = 2.0,
        limits: ClientLimits | None = None,
        strip_billing_header: bool = True,
        tracer: Tracer | None = None,
        access: NodeAccess | None = None,
        scheme: str = "http",
        share_mb_per_s: int | None = None,
    ) -> None:
        """Without `access`, every local program may use it. `scheme`: of the URLs that clients use."""
        self._access = access or NodeAccess(NodeKeys())
        self._metrics = Metrics(backend)
        self._parser = BodyParser()
        self._unloads = KeepAliveUnloads(backend)
        self._tasks: set[asyncio.Task[None]] = set()
        ticker = Ticker(asyncio.get_running_loop())
        usage_records = UsageRecords()
        inference = Inference(
            backend,
            drain_gate,
            self._metrics,
            usage_records,
            ticker,
            keepalive_s,
            strip_billing_header,
            tracer or NoTracer(),
            self._parser,
            self._unloads,
        )
        self._router = Router(
            [
                *(Route("POST", path, inference.handler(name)) for path, name in ROUTES.items()),
                *PoolingRoutes(inference).routes(),
                *OpaqueRoutes(inference).routes(),
                *Tokens(backend, strip_billing_header, self._parser).routes(),
                *ModelRoutes(backend).routes(),
                *OllamaRoutes(backend, drain_gate, ticker, keepalive_s, self._parser, self._by_path).routes(),
                Route("GET", "/metrics", self._expose),
                *usage_records.routes(),
                *SharedFiles(backend, share_mb_per_s).routes(),
                *KvBlocks(backend).routes(),
                *Control(backend, drain_gate, self._access, ticker, keepalive_s, scheme).routes(),
            ],
            "the API begins at /v1 and /discovery",
        )
        self.server = Server(self._handle, responses.rejection, ticker, limits, self._admit_head)

    async def close(self, grace_s: float = 0.0) -> None:
        """Accept nothing more, give running responses `grace_s` to reach their clients, then cancel them. Clients that
        have just connected get a moment for their first request, and a response to it."""
        await self.server.stop_accepting(grace_s)
        await self.server.close(grace_s)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._unloads.close()
        await self._parser.close()

    def _admit_head(self, request: Request) -> int | Spooled:
        """Reject a request before its body is read."""
        route = self._admit(request).route
        return (route.body_limit or in_memory)(request, self.server.limits)

    def _admit(self, request: Request) -> Match[Handler]:
        """The route of a request that may be served. Raises CortexError."""
        match = self._router.match(request)
        self._access.check(request, match)
        match = match or self._router.find(request)
        self._access.check_form(request, match.route)
        return match

    def _handle(self, exchange: Exchange) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def cancel() -> None:
            task.cancel()

        exchange.on_disconnect(cancel)

    async def _serve(self, exchange: Exchange) -> None:
        """Sets the request's id, turns exceptions of the handler into error responses, and logs the outcome."""
        request = exchange.request
        family = responses.family_of(request)
        given = request.header(REQUEST_ID_HEADER) or b""
        id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        exchange.added_headers = ((REQUEST_ID_HEADER, id),)
        if family.id_header is not None:
            exchange.added_headers = (*exchange.added_headers, (family.id_header, id))
        request_id.set(id.decode())
        stream_failure.set("")
        began_s = time.monotonic()
        try:
            match = self._admit(request)
            response = await match.route.handler(ApiCall(exchange, match.values))
        except asyncio.CancelledError:
            _log(request, "client disconnected", began_s)
            raise
        except Exception as problem:  # noqa: BLE001 - the boundary: every exception becomes a response
            error = responses.error_of(problem, request)
            response = responses.error(error, family)
            _log(request, f"{response.status} {error.code}: {error.message}", began_s)
        else:
            _log(request, f"{200 if response is None else response.status}{stream_failure.get()}", began_s)
        if response is None:
            return
        if exchange.started:
            exchange.abort()
        else:
            exchange.respond(*response)

    async def _by_path(self, call: ApiCall) -> Response | None:
        match = self._router.find(call.request)
        call.values = match.values
        return await match.route.handler(call)

    async def _expose(self, _: ApiCall) -> Response:
        return Response(200, ((b"content-type", CONTENT_TYPE_LATEST.encode()),), self._metrics.exposition())


def _log(request: Request, outcome: str, began_s: float) -> None:
    level = logging.DEBUG if request.method == b"GET" else logging.INFO
    elapsed_ms = (time.monotonic() - began_s) * 1000
    log.log(level, "%s %s %s in %.0f ms", loggable(request.method), loggable(request.path), outcome, elapsed_ms)


class CannotListen(Exception):
    """The address cannot be bound; the message says what to do."""


class KeyNeeded(SettingsError):
    """Others could use the node without a key; the message says what to do."""


def bind(address: Listen) -> list[socket.socket]:
    """Listening sockets. Raises `CannotListen`."""
    try:
        return listener.listen(address.host, address.port)
    except OSError as problem:
        if problem.errno == errno.EADDRINUSE:
            raise CannotListen(f"port {address.port} is in use; stop what runs there or set another `port`") from None
        raise CannotListen(f"cannot listen on {address}: {problem.strerror or problem}; correct `listen`") from None


class ReloadableSettings:
    """The node's keys and certificate, both reloaded while it runs, together with the other reloadable settings."""

    def __init__(self, config: NeuronConfig, path: Path | None, *, insecure: bool) -> None:
        """`path` is the file of `config`, where relative paths start. Raises SettingsError when keys or certificate
        cannot be used, and when others could use the node without a key, unless `insecure` permits that."""
        self._config = config
        self.use: Callable[[NeuronConfig], Awaitable[tuple[str, ...]]] | None = None
        """Applies the rest of a changed configuration; returns the keys that need a restart. Set once there is a
        node."""
        self._path = path
        self._directory = path.parent if path is not None else Path.cwd()
        self._stamps = self._read_stamps()  # before the keys: a file that changes while they are read is read again
        self.keys = NodeKeys(read_keys(config, self._directory))
        self.access = NodeAccess(self.keys, config.allowed_hosts)
        self.certificate: ServerCertificate | None = None
        if config.tls_cert is not None and config.tls_key is not None:
            self.certificate = ServerCertificate(
                self._directory / config.tls_cert.expanduser(), self._directory / config.tls_key.expanduser()
            )
        if self.keys.required or config.address.is_loopback:
            return
        if not insecure:
            raise KeyNeeded(
                f"the node would listen on {config.address} without a key, and anybody who can reach it could load and"
                f" use models: set `key_file` (`neuron key` makes a key), or listen on 127.0.0.1:{config.address.port},"
                " or start it with --insecure"
            )
        log.warning("anybody who can reach %s may load and use models: there is no key (--insecure)", config.address)

    async def watch(self, check_s: float = CHECK_FILES_S) -> None:
        """Apply changed files until cancelled. A file that cannot be used is logged, and the old one stays in force."""
        while True:
            await asyncio.sleep(check_s)
            if self.certificate is not None:
                self.certificate.reload_if_changed()
            found = self._read_stamps()
            if found == self._stamps:
                continue
            self._stamps = found
            try:
                config = load_config(self._path)
                self.keys.use(read_keys(config, self._directory))
            except SettingsError as problem:
                log.error("configuration not reloaded, the old one stays in force: %s", problem)
                continue
            logs.configure(config.log_format, config.log_level, common_fields)
            needed = () if self.use is None else await self.use(config)
            for key in needed:
                log.warning("%s has changed: restart the node to use it", key)
            log.info("configuration reloaded: keys, models, servers, drain_s and the log")

    def _read_stamps(self) -> list[Stamp]:
        key_file = self._config.key_file
        files = [self._path, self._directory / key_file.expanduser() if key_file is not None else None]
        return [stamp(file) for file in files if file is not None]


def client_limits(config: NeuronConfig, num_files: int) -> ClientLimits:
    """The configured limits, converted for the HTTP server of a process that may open `num_files`."""
    limits = config.limits
    connections = open_files.connections(
        num_files,
        files_each=1,
        one_of=2,  # a gateway is one client
        in_all=limits.max_connections,
        per_client=limits.max_connections_per_client,
    )
    body_bytes = config.max_body_mb * 1024 * 1024
    return ClientLimits(
        num_connections=connections.in_all,
        num_connections_per_client=connections.per_client,
        buffered_bytes=max(_BUFFERED_BYTES, 2 * body_bytes),
        body_bytes=body_bytes,
        upload_bytes=config.max_upload_mb << 20,
        spooled_bytes=(config.max_upload_mb << 20) * 4,
        head_s=limits.head_timeout_s,
    )


async def serve(
    config: NeuronConfig, path: Path | None = None, *, insecure: bool = False, stop: asyncio.Event | None = None
) -> None:
    """Runs the node until SIGTERM, SIGINT or `stop`. Raises `SettingsError` or `CannotListen` before anything is
    started. `path` is the file of `config`; `insecure` permits other hosts without a key.

    Shutdown ends queued requests at once and gives running ones `drain_s`. A second signal ends the process, and its
    workers, immediately.
    """
    logs.configure(config.log_format, config.log_level, common_fields)
    open_files.raise_limit()
    stop = stop or asyncio.Event()
    reloadable = ReloadableSettings(config, path, insecure=insecure)
    tracer = open_tracer(config.telemetry, "neuron")
    loop = asyncio.get_running_loop()
    sockets = await asyncio.to_thread(bind, config.address)
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        node = await Node.start(config)
        if node.discovery.driver_problem is not None:
            log.warning("%s", node.discovery.driver_problem)
        try:
            await _serve_node(node, config, reloadable, sockets, tracer, stop)
        finally:
            await node.close()
    finally:
        await asyncio.to_thread(tracer.close)
        for listening in sockets:
            listening.close()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _serve_node(
    node: Node,
    config: NeuronConfig,
    reloadable: ReloadableSettings,
    sockets: Sequence[socket.socket],
    tracer: Tracer,
    stop: asyncio.Event,
) -> None:
    drain_gate = DrainGate()
    scheme = "http" if reloadable.certificate is None else "https"
    api = NodeApi(
        node,
        drain_gate,
        keepalive_s=config.keepalive_s,
        limits=client_limits(config, open_files.limit()),
        strip_billing_header=config.strip_billing_header,
        tracer=tracer,
        access=reloadable.access,
        scheme=scheme,
        share_mb_per_s=config.limits.share_mb_per_s,
    )
    host, port = api.server.listen_on(
        sockets, tls=reloadable.certificate.context if reloadable.certificate is not None else None
    )
    # Objects from imports live as long as the process: exclude them from garbage collection.
    gc.collect()
    gc.freeze()
    reloadable.use = node.reconfigure
    watching = Supervisor().start("watch keys, certificate and configuration", reloadable.watch)
    manager = ServiceManager()
    alive = asyncio.create_task(manager.keep_alive())
    try:
        log.info("listening on %s://%s:%d", scheme, f"[{host}]" if ":" in host else host, port)
        manager.notify(READY)
        await stop.wait()
        manager.notify(STOPPING)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        num_requests = plural(drain_gate.num_requests, "request")
        log.info("shutting down: draining %s, up to %s", num_requests, duration(config.drain_s))
        drain_gate.close()
        await node.close()
        await drain_gate.drained(_FLUSH_S)
    finally:
        watching.cancel()
        await watching.ended()
        await api.close(_FLUSH_S)
        alive.cancel()
