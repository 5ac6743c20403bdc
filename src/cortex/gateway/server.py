"""The gateway process: nodes, dispatcher, data path, control and metrics, put together, started, reloaded and ended."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import os
import signal
from collections.abc import Iterable
from pathlib import Path

from cortex import settings
from cortex.fleet.catalogue import Catalogue
from cortex.gateway import config as configuration
from cortex.gateway.api.control import Control
from cortex.gateway.config import Config, NeuronSection
from cortex.gateway.dispatch.dispatcher import Dispatcher
from cortex.gateway.dispatch.effects import NodeEffects
from cortex.gateway.dispatch.event_log import EventLog
from cortex.gateway.dispatch.fleet_state import DispatchSettings
from cortex.gateway.dispatch.measured_sizes import MeasuredSizes
from cortex.gateway.dispatch.node_client import NodeClient
from cortex.gateway.dispatch.poller import Poller
from cortex.gateway.ledger.meter import Metering
from cortex.gateway.ledger.store import StoreError
from cortex.gateway.metrics import CONTENT_TYPE, Metrics, fleet_gauges
from cortex.gateway.proxy.admission import AdmissionController
from cortex.gateway.proxy.disconnected_usage import DisconnectedUsage
from cortex.gateway.proxy.inference import Inference
from cortex.gateway.proxy.listener import CONTROL_BODY_BYTES, api_server
from cortex.gateway.proxy.routes import ROUTES, error_response, rejection_response
from cortex.gateway.proxy.services import Services
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Server
from cortex.http.ticker import Ticker
from cortex.settings import Listen, SettingsError
from cortex.telemetry import logs, open_tracer
from cortex.wire.errors import Family, MethodNotAllowed, RouteNotFound

log = logging.getLogger(__name__)

TICK_S = 1.0
WATCH_FILES_S = 2.0
FIRST_POLL_S = 2.5
"""How long the start waits for the first polls."""


class CannotListen(Exception):
    """The address is taken or does not belong to this host. The message says which and what to do."""


class Gateway:
    """One gateway process. Everything it owns lives on the running loop."""

    def __init__(self, config: Config, catalogue: Catalogue, directory: Path) -> None:
        """Relative paths of the configuration start at `directory`. Raises SettingsError."""
        loop = asyncio.get_running_loop()
        self.config = config
        self._ticker = Ticker(loop)
        self._nodes: dict[str, NodeClient] = {}
        self._pollers: dict[str, Poller] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._measured_sizes = MeasuredSizes(config.state_directory(directory))
        self.event_log = EventLog()
        self.metrics = Metrics(
            lambda: fleet_gauges(self.dispatcher.fleet, self.dispatcher.queue_depths, self.dispatcher.in_flight)
        )
        self._effects = NodeEffects(self._nodes, self._pollers, self.metrics, loop.time)
        self.dispatcher = Dispatcher(
            self._effects,
            self.event_log,
            loop.time,
            DispatchSettings.of(config, catalogue),
            measured=self._measured_sizes.read(),
        )
        self._effects.outcomes = self.dispatcher
        self._metering = Metering(directory)
        self._tracer = open_tracer(config.telemetry, "cortex")
        self._admission = AdmissionController(self.dispatcher, self._metering.meter)
        self._services = Services(
            config=config.gateway,
            admission=self._admission,
            dispatcher=self.dispatcher,
            nodes=self._nodes,
            metrics=self.metrics,
            tracer=self._tracer,
            ticker=self._ticker,
            disconnected_usage=DisconnectedUsage(),
            clock=loop.time,
        )
        self._inference = Inference(self._services)
        self._control = Control(self.dispatcher, self.event_log, self._metering.meter)
        self.server = api_server(self._handle, config, self._ticker, self.metrics, self._admission.authenticate)
        limits = dataclasses.replace(self.server.limits, body_bytes=CONTROL_BODY_BYTES)
        self._metrics_server = Server(self._handle_metrics, rejection_response, self._ticker, limits)

    async def start(self) -> tuple[str, int]:
        """Open the ledger, poll every node once, then listen; returns the API's address.

        Raises `StoreError` or `CannotListen`.
        """
        await self._use_keys(self.config)
        self._join_nodes(self.config.neurons)
        polls = [asyncio.create_task(poller.poll()) for poller in self._pollers.values()]
        if polls:
            await asyncio.wait(polls, timeout=FIRST_POLL_S)
        for poller in self._pollers.values():
            poller.start()
        section = self.config.gateway
        address = await _listen(self.server, section.listen, "gateway.listen")
        if section.metrics_listen is not None:
            await _listen(self._metrics_server, section.metrics_listen, "gateway.metrics_listen")
        self._tasks.append(asyncio.create_task(self._tick(), name="tick"))
        _warn_if_open(self.config)
        return address

    async def close(self, grace_s: float = 0.0) -> None:
        """Admit nothing, fail waiting requests, drain running responses for up to `grace_s`, then close everything."""
        self._inference.closing = True
        self.dispatcher.close()
        await self.server.close(grace_s)
        await self._metrics_server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(poller.stop() for poller in self._pollers.values()))
        await self._effects.close()
        await self._services.disconnected_usage.close()
        for node in self._nodes.values():
            node.pool.close()
        await self._metering.close()
        await asyncio.to_thread(self._tracer.close)
        await asyncio.to_thread(self._measured_sizes.write, self.dispatcher.fleet.measured)

    async def reconfigure(self, config: Config, catalogue: Catalogue) -> None:
        """Use a new configuration. Running responses continue; addresses need a restart.

        Raises `StoreError`, and then nothing has changed.
        """
        await self._use_keys(config)
        before = self.config
        if before.keys:
            _warn_if_open(config)
        for key in ("listen", "metrics_listen", "state", "max_body_mb", "poll_interval_s", "cors_origins"):
            if getattr(before.gateway, key) != getattr(config.gateway, key):
                log.warning("gateway.%s has changed: restart the gateway to use it", key)
        for key in ("limits", "telemetry"):
            if getattr(before, key) != getattr(config, key):
                log.warning("%s has changed: restart the gateway to use it", key)
        kept = {section.name for section in config.neurons if section in before.neurons}
        leaving = [self._pollers.pop(name) for name in list(self._pollers) if name not in kept]
        await asyncio.gather(*(poller.stop() for poller in leaving))
        for name in [name for name in self._nodes if name not in kept]:
            self._nodes.pop(name).pool.close()
        self.config = config
        self._services.config = config.gateway
        logs.configure(config.gateway.log_format, config.gateway.log_level)
        self._join_nodes(section for section in config.neurons if section.name not in kept)
        self.dispatcher.reconfigure(DispatchSettings.of(config, catalogue))
        for section in config.neurons:
            if section.name not in kept:
                self._pollers[section.name].start()

    async def _use_keys(self, config: Config) -> None:
        await self._metering.use(config)
        self._admission.meter = self._control.meter = self._metering.meter

    def _join_nodes(self, sections: Iterable[NeuronSection]) -> None:
        for section in sections:
            client = NodeClient.of(section, self._ticker, self.config.gateway, os.environ)
            self._nodes[section.name] = client
            self._pollers[section.name] = Poller(client, self.dispatcher, self.config.gateway.poll_interval_s)

    def _handle(self, exchange: Exchange) -> None:
        request = exchange.request
        route = ROUTES.get(request.path)
        if route is None:
            self._control.handle(exchange)
        elif request.method == b"POST":
            self._inference.begin(exchange, route)
        else:
            error = MethodNotAllowed(f"{request.path.decode()} takes POST only.", details={"allowed_methods": ["POST"]})
            exchange.respond(*error_response(error, route.family))

    def _handle_metrics(self, exchange: Exchange) -> None:
        if exchange.request.path in (b"/metrics", b"/"):
            exchange.respond(200, ((b"content-type", CONTENT_TYPE.encode()),), self.metrics.exposition())
        else:
            exchange.respond(*error_response(RouteNotFound("The metrics are at /metrics."), Family.OPENAI))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.dispatcher.tick()
            await asyncio.to_thread(self._measured_sizes.write, self.dispatcher.fleet.measured)


def _warn_if_open(config: Config) -> None:
    listen = config.gateway.listen
    if not config.keys and not listen.is_loopback:
        log.warning(
            "anybody who can reach %s may use this gateway: no [[keys]] are configured. "
            'Add one with `cortex keys add`, or set listen = "127.0.0.1:%s"',
            listen,
            listen.port,
        )


async def _listen(server: Server, listen: Listen, key: str) -> tuple[str, int]:
    try:
        return await server.listen(listen.host, listen.port)
    except OSError as problem:
        raise CannotListen(
            f"cannot listen on {listen}: {problem.strerror or problem}; stop what uses it, or set {key}"
        ) from problem


def load_catalogue(config: Config, path: Path | None) -> Catalogue:
    """`models.toml` beside the configuration; an empty catalogue when there is none. Raises SettingsError."""
    catalogue = catalogue_path(config, path)
    if not catalogue.exists():
        return Catalogue()
    return settings.load(Catalogue, catalogue, env_prefix="", env={})


def catalogue_path(config: Config, path: Path | None) -> Path:
    return _directory(path) / config.gateway.models


def _directory(path: Path | None) -> Path:
    return path.parent if path is not None else Path.cwd()


async def serve(config: Config, path: Path | None = None) -> None:
    """Run a gateway until SIGTERM or SIGINT; reload `path` on SIGHUP and when it changes.

    Raises SettingsError, CannotListen or StoreError.
    """
    logs.configure(config.gateway.log_format, config.gateway.log_level)
    gateway = Gateway(config, load_catalogue(config, path), _directory(path))
    loop = asyncio.get_running_loop()
    stop, reload = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, reload.set)
    host, port = await gateway.start()
    # Objects from imports live as long as the process: exclude them from garbage collection.
    gc.collect()
    gc.freeze()
    log.info("cortex listens on http://%s:%s with %d nodes", host, port, len(config.neurons))
    reloader = asyncio.create_task(_reload_when_needed(gateway, path, reload), name="reload")
    try:
        await stop.wait()
        log.info("shutting down: draining responses, up to %.0f s", gateway.config.gateway.drain_s)
    finally:
        reloader.cancel()
        await asyncio.gather(reloader, return_exceptions=True)
        await gateway.close(gateway.config.gateway.drain_s)


async def _reload_when_needed(gateway: Gateway, path: Path | None, requested: asyncio.Event) -> None:
    stamps = _stamps(gateway.config, path)
    while True:
        try:
            async with asyncio.timeout(WATCH_FILES_S):
                await requested.wait()
        except TimeoutError:
            pass
        found = _stamps(gateway.config, path)
        if not requested.is_set() and found == stamps:
            continue
        requested.clear()
        stamps = found
        try:
            config = configuration.load(path, os.environ)
            await gateway.reconfigure(config, load_catalogue(config, path))
            log.info("configuration reloaded: %d nodes", len(config.neurons))
        except (SettingsError, StoreError) as problem:
            log.error("configuration not reloaded, the old one stays in force: %s", problem)


def _stamps(config: Config, path: Path | None) -> tuple[int, ...]:
    """When the files were last written; 0 for a missing one."""
    files = [file for file in (path, catalogue_path(config, path)) if file is not None]
    return tuple(file.stat().st_mtime_ns if file.exists() else 0 for file in files)
