"""The gateway process: nodes, dispatcher, data path, control and metrics, put together, started, reloaded and ended."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import os
import signal
from pathlib import Path

from cortex.fleet.catalogue import Catalogue
from cortex.gateway.api.control import Control
from cortex.gateway.api.health import GatewayHealth
from cortex.gateway.config import Config
from cortex.gateway.configuration_files import ConfigurationFiles, load_catalogue
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
from cortex.tasks import SupervisedTask, Supervisor
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
        self._measured_sizes = MeasuredSizes(config.state_directory(directory))
        self.event_log = EventLog()
        self.metrics = Metrics(
            lambda: fleet_gauges(self.dispatcher.fleet, self.dispatcher.queue_depths, self.dispatcher.in_flight)
        )
        self.tasks = Supervisor(lambda name: self.metrics.task_restarts.labels(name).inc())
        self._ticking: SupervisedTask | None = None
        self._effects = NodeEffects(self._nodes, self._pollers, self.metrics, loop.time)
        self.dispatcher = Dispatcher(
            self._effects,
            self.event_log,
            loop.time,
            DispatchSettings.of(config, catalogue),
            measured=self._measured_sizes.read(),
        )
        self._effects.outcomes = self.dispatcher
        self._metering = Metering(directory, self.tasks)
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
        self._health = GatewayHealth(self.tasks)
        self._control = Control(self.dispatcher, self.event_log, self._metering.meter, self._health)
        self.server = api_server(self._handle, config, self._ticker, self.metrics, self._admission.authenticate)
        limits = dataclasses.replace(self.server.limits, body_bytes=CONTROL_BODY_BYTES)
        self._metrics_server = Server(self._handle_metrics, rejection_response, self._ticker, limits)

    async def start(self) -> tuple[str, int]:
        """Open the ledger, poll every node once, then listen; returns the API's address.

        Raises `StoreError` or `CannotListen`.
        """
        await self._use_keys(self.config)
        for neuron in self.config.neurons:
            self._join(NodeClient.of(neuron, self._ticker, self.config.gateway, os.environ))
        polls = [asyncio.create_task(poller.poll()) for poller in self._pollers.values()]
        if polls:
            await asyncio.wait(polls, timeout=FIRST_POLL_S)
        for poller in self._pollers.values():
            poller.start()
        section = self.config.gateway
        address = await _listen(self.server, section.listen, "gateway.listen")
        if section.metrics_listen is not None:
            await _listen(self._metrics_server, section.metrics_listen, "gateway.metrics_listen")
        self._ticking = self.tasks.start("tick", self._tick)
        self._warn_about_access()
        return address

    async def close(self, grace_s: float = 0.0) -> None:
        """Admit nothing, fail waiting requests, drain running responses for up to `grace_s`, then close everything."""
        self._inference.closing = True
        self.dispatcher.close()
        await self.server.close(grace_s)
        await self._metrics_server.close()
        if self._ticking is not None:
            self._ticking.cancel()
            await self._ticking.ended()
        await asyncio.gather(*(poller.stop() for poller in self._pollers.values()))
        await self._effects.close()
        await self._services.disconnected_usage.close()
        for node in self._nodes.values():
            node.pool.close()
        await self._metering.close()
        await asyncio.to_thread(self._tracer.close)
        await asyncio.to_thread(self._measured_sizes.write, self.dispatcher.fleet.measured)

    async def reload(self, files: ConfigurationFiles) -> None:
        """Read and use the configuration in `files`.

        Never raises. If anything fails, the configuration in force stays as it is, and `/health` has the reason.
        """
        try:
            config, catalogue = files.read()
            await self.reconfigure(config, catalogue)
        except Exception as problem:  # any error counts: one that is not expected must not end reloading
            is_expected = isinstance(problem, SettingsError | StoreError)
            reason = str(problem) if is_expected else f"unexpected {type(problem).__name__}: {problem}"
            self._health.stale_reason = reason
            self.metrics.config_reloads.labels("rejected").inc()
            log.error(
                "configuration not reloaded, the old one stays in force: %s",
                reason,
                exc_info=None if is_expected else problem,
            )
        else:
            self._health.stale_reason = None
            self.metrics.config_reloads.labels("applied").inc()
            log.info("configuration reloaded: %d nodes", len(config.neurons))

    async def reconfigure(self, config: Config, catalogue: Catalogue) -> None:
        """Use a new configuration. Running responses continue; addresses need a restart.

        Raises what the start would raise, and then nothing has changed.
        """
        before, was_open = self.config, self._metering.is_open
        if config.telemetry != before.telemetry:
            await asyncio.to_thread(open_tracer(config.telemetry, "cortex").close)  # is it usable after a restart?
        settings = DispatchSettings.of(config, catalogue)
        kept = {section.name for section in config.neurons if section in before.neurons}
        joining = [
            NodeClient.of(section, self._ticker, config.gateway, os.environ)
            for section in config.neurons
            if section.name not in kept
        ]
        await self._use_keys(config)
        # From here to the end of the changes nothing waits and nothing is expected to fail.
        leaving = [self._pollers.pop(name) for name in list(self._pollers) if name not in kept]
        for poller in leaving:
            poller.cancel()
        for name in [name for name in self._nodes if name not in kept]:
            self._nodes.pop(name).pool.close()
        self.config = config
        self._services.config = config.gateway
        logs.configure(config.gateway.log_format, config.gateway.log_level)
        for client in joining:
            self._join(client)
        self.dispatcher.reconfigure(settings)
        for client in joining:
            self._pollers[client.name].start()
        _warn_about_restart(before, config)
        if self._metering.is_open != was_open or bool(before.keys) != bool(config.keys):
            self._warn_about_access()
        await asyncio.gather(*(poller.stop() for poller in leaving))

    async def _use_keys(self, config: Config) -> None:
        await self._metering.use(config)
        self._admission.meter = self._control.meter = self._metering.meter

    def _join(self, client: NodeClient) -> None:
        self._nodes[client.name] = client
        self._pollers[client.name] = Poller(client, self.dispatcher, self.config.gateway.poll_interval_s, self.tasks)

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

    def _warn_about_access(self) -> None:
        section = self.config.gateway
        if not self._metering.is_open:
            if not self.config.keys:
                log.warning(
                    "every request is rejected: this gateway had keys and has none now. "
                    "Add one with `cortex keys add`, or set gateway.open = true to admit everybody"
                )
            elif section.open:
                log.warning("gateway.open has no effect while [[keys]] are configured: remove one of the two")
        elif not section.listen.is_loopback:
            log.warning(
                "anybody who can reach %s may use this gateway: no [[keys]] are configured. "
                'Add one with `cortex keys add`, or set listen = "127.0.0.1:%s"',
                section.listen,
                section.listen.port,
            )

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.dispatcher.tick()
            await asyncio.to_thread(self._measured_sizes.write, self.dispatcher.fleet.measured)


def _warn_about_restart(before: Config, after: Config) -> None:
    """Name the changed keys that a reload does not apply."""
    addresses = ("listen", "metrics_listen", "cors_origins")
    for key in (*addresses, "state", "max_body_mb", "connect_timeout_s", "poll_interval_s"):
        if getattr(before.gateway, key) != getattr(after.gateway, key):
            log.warning("gateway.%s has changed: restart the gateway to use it", key)
    for key in ("limits", "ledger", "telemetry"):
        if getattr(before, key) != getattr(after, key):
            log.warning("%s has changed: restart the gateway to use it", key)


async def _listen(server: Server, listen: Listen, key: str) -> tuple[str, int]:
    try:
        return await server.listen(listen.host, listen.port)
    except OSError as problem:
        raise CannotListen(
            f"cannot listen on {listen}: {problem.strerror or problem}; stop what uses it, or set {key}"
        ) from problem


async def serve(config: Config, path: Path | None = None) -> None:
    """Run a gateway until SIGTERM or SIGINT; reload `path` on SIGHUP and when it changes.

    Raises SettingsError, CannotListen or StoreError.
    """
    logs.configure(config.gateway.log_format, config.gateway.log_level)
    files = ConfigurationFiles(path, os.environ)
    gateway = Gateway(config, load_catalogue(config, path), files.directory)
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
    reloader = gateway.tasks.start("reload", lambda: _reload_when_needed(gateway, files, reload))
    try:
        await stop.wait()
        log.info("shutting down: draining responses, up to %.0f s", gateway.config.gateway.drain_s)
    finally:
        reloader.cancel()
        await reloader.ended()
        await gateway.close(gateway.config.gateway.drain_s)


async def _reload_when_needed(gateway: Gateway, files: ConfigurationFiles, requested: asyncio.Event) -> None:
    stamps = files.stamps(gateway.config)
    while True:
        try:
            async with asyncio.timeout(WATCH_FILES_S):
                await requested.wait()
        except TimeoutError:
            pass
        found = files.stamps(gateway.config)
        if requested.is_set() or found != stamps:
            requested.clear()
            stamps = found
            await gateway.reload(files)
