"""The daemon: binds the listener, starts the node, serves its API and shuts down gracefully."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from cortex.http.limits import ClientLimits
from cortex.http.server import listener
from cortex.http.tls import CHECK_FILES_S, ServerCertificate
from cortex.neuron.api.access import NodeAccess, NodeKeys, read_keys
from cortex.neuron.api.app import NodeApi
from cortex.neuron.api.drain_gate import DrainGate
from cortex.neuron.api.log_context import common_fields
from cortex.neuron.config import NeuronConfig
from cortex.neuron.config import load as load_config
from cortex.neuron.node.node import Node
from cortex.settings import Listen, SettingsError, Stamp, stamp
from cortex.system import open_files
from cortex.system.service_manager import READY, STOPPING, ServiceManager
from cortex.system.tasks import Supervisor
from cortex.telemetry import logs
from cortex.telemetry.spans import Tracer
from cortex.telemetry.tracing import open_tracer
from cortex.wire.words import duration, plural

log = logging.getLogger(__name__)

_BUFFERED_BYTES = 1 << 30
"""Minimum limit for request bodies in memory, of all connections together."""
_FLUSH_S = 2.0
"""How long responses that the node has ended may take to reach their clients."""


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
