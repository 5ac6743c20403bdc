"""The gateway: nodes, dispatcher, data path, control and metrics, put together, started, reloaded and ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from cortex.fleet.catalogue import Alias, Catalogue, ModelSpec
from cortex.fleet.idle_caps import IdleCaps
from cortex.gateway import history
from cortex.gateway.api.activity import ActivityRoutes, AuditRoutes, HistoryRoutes
from cortex.gateway.api.benches import BenchRoutes
from cortex.gateway.api.control import Control
from cortex.gateway.api.files import FileRoutes
from cortex.gateway.api.health import GatewayHealth
from cortex.gateway.api.jobs import JobBoard, JobRoutes
from cortex.gateway.api.kept_prompts import KeptPromptRoutes
from cortex.gateway.api.keys import KeyRoutes
from cortex.gateway.api.live.event_streams import EventStreams
from cortex.gateway.api.llama_cpp import LlamaCppRoutes
from cortex.gateway.api.model_servers import ModelServerRoutes
from cortex.gateway.api.ollama.creation import CreationRoutes
from cortex.gateway.api.ollama.inference import OllamaInference
from cortex.gateway.api.ollama.routes import OllamaRoutes
from cortex.gateway.api.orders import OrderRoutes
from cortex.gateway.api.parts import ApiServices
from cortex.gateway.api.usage import UsageRoutes
from cortex.gateway.batches.api import BatchService
from cortex.gateway.batches.runner import BatchLimits
from cortex.gateway.config import Config
from cortex.gateway.configuration_files import ConfigurationFiles, warn_about_access, warn_about_restart
from cortex.gateway.created_models import CreatedModels, joined, with_entry, without_entries
from cortex.gateway.database import Database, StoreError, driver_of
from cortex.gateway.dispatch.dispatcher import Dispatcher
from cortex.gateway.dispatch.effects import NodeEffects
from cortex.gateway.dispatch.event_log import EventLog
from cortex.gateway.dispatch.fleet_state import DispatchSettings
from cortex.gateway.dispatch.measured_sizes import MeasuredSizes
from cortex.gateway.dispatch.nodes.dns_discovery import DNSDiscovery, Resolve, resolve_addresses
from cortex.gateway.dispatch.nodes.neighbours import Neighbours
from cortex.gateway.dispatch.operator import audit
from cortex.gateway.dispatch.operator import state as operator_state
from cortex.gateway.dispatch.operator.audit import AuditLog, record_changed_keys
from cortex.gateway.dispatch.operator.commands import OperatorCommands
from cortex.gateway.dispatch.operator.state import OperatorState
from cortex.gateway.history import HistoryStore
from cortex.gateway.ledger.meter import Metering
from cortex.gateway.listening import ListeningSockets, certificate_of
from cortex.gateway.metrics import GaugeSample, Metrics, fleet_gauges
from cortex.gateway.node_connections import NodeConnections
from cortex.gateway.page.conversations import Conversations
from cortex.gateway.page.openid import check_library
from cortex.gateway.page.page import Page
from cortex.gateway.page.signing_in import REST_INTERVAL_S, SignInAttempts, SigningIn
from cortex.gateway.pictures import PictureFetcher, PictureInlining
from cortex.gateway.proxy.accounting import activity, request_log
from cortex.gateway.proxy.accounting.activity import ActivityFile, ActivityLog
from cortex.gateway.proxy.accounting.request_log import RequestLog
from cortex.gateway.proxy.accounting.running import RunningRequests
from cortex.gateway.proxy.admission import AdmissionController
from cortex.gateway.proxy.deferred_responses import DeferredResponses
from cortex.gateway.proxy.inference import Inference
from cortex.gateway.proxy.listener import api_server, client_limits, metrics_server, paths_without_key
from cortex.gateway.proxy.services import RequestLimits, Services
from cortex.gateway.responses.service import ResponsesService
from cortex.gateway.routes import GatewayRoutes
from cortex.http.cross_site import CrossSiteCheck
from cortex.http.limits import Buffered
from cortex.http.ticker import Ticker
from cortex.parsing.parser import BodyParser
from cortex.settings import SettingsError
from cortex.system import open_files
from cortex.system.tasks import OwnedTasks, SupervisedTask, Supervisor
from cortex.telemetry import logs
from cortex.telemetry.tracing import open_tracer

log = logging.getLogger(__name__)

TICK_S = 1.0
WATCH_KEYS_S = 0.4
"""Interval at which the database is checked for changed keys, which are in force everywhere within a second."""


class Gateway:
    """One gateway process. Everything it owns lives on the running loop."""

    def __init__(
        self,
        config: Config,
        catalogue: Catalogue,
        directory: Path,
        resolve: Resolve = resolve_addresses,
        fetcher: PictureFetcher | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        request_limits: RequestLimits | None = None,
        batch_limits: BatchLimits | None = None,
    ) -> None:
        """Relative paths of the configuration start at `directory`. Raises SettingsError or `StoreError`."""
        loop = asyncio.get_running_loop()
        self.config = config
        """Includes discovered nodes."""
        self._configured, self._catalogue = config, catalogue
        self._discovery = DNSDiscovery(resolve)
        self._ticker = Ticker(loop)
        self._tick_thread = ThreadPoolExecutor(1, thread_name_prefix="tick")
        """The tick has its own thread, because clients' work may occupy all of the default executor."""
        self._created_models = CreatedModels(config.state_directory(directory))
        self._measured_sizes = MeasuredSizes(config.state_directory(directory))
        self.event_log = EventLog()
        self.metrics = Metrics(self._gauges)
        self.tasks = Supervisor(lambda name: self.metrics.task_restarts.labels(name).inc())
        self._regular: list[SupervisedTask] = []
        self._connections = NodeConnections(self._ticker, directory, self.tasks)
        nodes = self._connections.clients
        neighbours = Neighbours(nodes, lambda: self.dispatcher.fleet, is_on=config.gateway.share_files)
        self._effects = NodeEffects(nodes, self._connections.pollers, self.metrics, clock, neighbours)
        self.dispatcher = Dispatcher(
            self._effects,
            self.event_log,
            clock,
            DispatchSettings.of(config, catalogue),
            measured=self._measured_sizes.read(),
        )
        self._effects.dispatcher = self.dispatcher
        self.database = Database(config.database(directory))
        self._responses_database = self.database
        if config.responses_database(directory) != self.database.location:
            self._responses_database = Database(config.responses_database(directory))
        self._metering = Metering(directory, self.database, self.tasks)
        self._operator_state = OperatorState(self.dispatcher, self.database)
        self._tracer = open_tracer(config.telemetry, "cortex")
        self._admission = AdmissionController(self.dispatcher, self._metering.meter, config.gateway.prefix_sharing)
        limits = client_limits(config, open_files.limit())
        parser, buffered = BodyParser(), Buffered(limits.buffered_bytes)
        self._services = Services(
            config=config.gateway,
            admission=self._admission,
            dispatcher=self.dispatcher,
            nodes=nodes,
            metrics=self.metrics,
            tracer=self._tracer,
            ticker=self._ticker,
            settling=OwnedTasks(),
            activity=ActivityLog(config.activity),
            running=RunningRequests(),
            parser=parser,
            pictures=PictureInlining(config.pictures, fetcher or PictureFetcher(self._ticker), parser, buffered),
            buffered=buffered,
            idle_caps=IdleCaps(),
            limits=request_limits or RequestLimits(),
            clock=clock,
        )
        self._activity_file = ActivityFile(config.state_directory(directory), self._services.activity)
        self._request_log = RequestLog(self._services.activity, self.database)
        self._audit = AuditLog(self.database, config.ledger.audit_days)
        self._history = HistoryStore(self._services.activity, self.event_log, self.database, config.gateway.listen.port)
        self._inference = Inference(self._services)
        self._deferred = DeferredResponses()
        self._responses = ResponsesService(
            config, self._responses_database, self._inference, self.tasks, limits, self._deferred
        )
        self._certificate = certificate_of(config, directory)
        self._health = GatewayHealth(
            self.tasks,
            self._certificate,
            is_database_away=lambda: self.database.is_failing,
            are_responses_away=lambda: (
                self._responses_database is not self.database and self._responses_database.is_failing
            ),
        )
        self._reloading = asyncio.Lock()
        self._streams = EventStreams(clock, self._metering)
        cross_site = CrossSiteCheck()
        self._batches = BatchService(
            config.batches,
            config.state_directory(directory),
            self.database,
            self._inference,
            self._metering,
            self.tasks,
            batch_limits or BatchLimits(),
            cross_site,
        )
        board = JobBoard()
        operator = OperatorCommands(self.dispatcher, self.event_log)
        self._api_tasks = OwnedTasks()
        api = ApiServices(self.dispatcher, nodes, self._metering, self._api_tasks, self._deferred)
        files = FileRoutes(api, neighbours, board)
        open_paths = paths_without_key(config)
        creations = CreationRoutes(api, files, self._created_models, self._change_created)
        key_routes = KeyRoutes(api, self._refresh_keys)
        orders = OrderRoutes(api, operator, board, self._operator_state.store)
        parts = (
            files,
            OllamaRoutes(api, files, open_paths, creations),
            creations,
            orders,
            BenchRoutes(api, operator, board),
            LlamaCppRoutes(api, orders, open_paths, self.event_log, self._streams),
            ModelServerRoutes(api, self.event_log),
            JobRoutes(api, board),
            AuditRoutes(api, self._audit),
            ActivityRoutes(api, self._services.activity, self._request_log, self._services.running, self._streams),
            HistoryRoutes(api, self._history.history),
            UsageRoutes(api),
            key_routes,
            KeptPromptRoutes(api, key_routes.find, lambda: self._admission.prefix_sharing),
        )
        self._control = Control(
            api,
            self.event_log,
            self._health,
            cross_site,
            self._streams,
            [*(route for part in parts for route in part.routes()), *self._batches.fleet_routes()],
            open_paths,
            self._audit,
        )
        attempts = SignInAttempts(self._audit)
        self._signing_in = SigningIn(self._metering, Conversations(self.database), attempts)
        ollama = OllamaInference(self._inference, operator, cross_site)
        page = Page(self._metering, self._signing_in, attempts, is_secure=self._certificate is not None)
        self._routes = GatewayRoutes(
            self._inference,
            self._responses,
            self._batches,
            ollama,
            self._control,
            page,
            cross_site,
            self._metering,
            open_paths,
        )
        self.server = api_server(
            self._routes.handle,
            self._routes.match,
            config,
            self._ticker,
            self.metrics,
            lambda request: self._admission.meter.key(request),  # a reload replaces the meter
            limits,
            self._services.buffered,
        )
        self._metrics_server = metrics_server(self.metrics, self._ticker, limits)

    async def start(self, sockets: ListeningSockets | None = None) -> tuple[str, int]:
        """Open the ledger, poll every node once, then listen; returns the API's address. An address that is taken is
        reported before a node is contacted.

        Raises `StoreError`, `SettingsError` or `CannotListen`.
        """
        await self._activity_file.restore()
        await self._history.restore()
        self._request_log.retention_days = self.config.activity.log_retention_days
        await self._use_keys(self.config)
        self._routes.configure(self.config, is_open=self._metering.is_open)
        section, sockets = self.config.gateway, sockets or ListeningSockets()
        await sockets.check(section)
        await self._operator_state.synchronise()
        await self._discovery.refresh(self.config.discovery)
        self.config = self._with_discovered(self.config)
        self.dispatcher.reconfigure(DispatchSettings.of(self.config, self._catalogue))
        self._connections.join(self._connections.planned(self.config), self.dispatcher)
        await self._connections.begin()
        tls = self._certificate.context if self._certificate is not None else None
        address = await sockets.listen(self.server, section.listen, "gateway.listen", tls)
        if section.ollama_listen is not None:
            await sockets.listen(self.server, section.ollama_listen, "gateway.ollama_listen", tls)
        if section.metrics_listen is not None:
            await sockets.listen(self._metrics_server, section.metrics_listen, "gateway.metrics_listen", tls)
        sockets.check_all_used()
        self._regular = [
            self.tasks.every(TICK_S, "tick", self._tick),
            self.tasks.every(operator_state.INTERVAL_S, "operator state", self._operator_state.synchronise),
            self.tasks.every(activity.INTERVAL_S, "keep activity", self._activity_file.save),
            self.tasks.every(request_log.FLUSH_S, "request log", self._request_log.flush),
            self.tasks.every(audit.FLUSH_S, "audit log", self._audit.flush),
            self.tasks.every(history.INTERVAL_S, "history", self._history.save),
            self.tasks.every(WATCH_KEYS_S, "keys", self._watch_keys),
            self.tasks.start("discover nodes", self._discover_nodes),
            self.tasks.every(REST_INTERVAL_S, "end idle sign-in process", self._signing_in.rest_idle),
        ]
        if self._certificate is not None:
            self._regular.append(self.tasks.start("renew certificate", self._certificate.watch))
        self._responses.start()
        self._batches.start()
        self._warn_about_access()
        return address

    async def close(self, grace_s: float = 0.0) -> None:
        """Admit nothing, fail waiting requests, drain running responses for up to `grace_s`, then close everything."""
        await self._metrics_server.stop_accepting()  # a successor may bind all addresses now
        await self.server.stop_accepting(grace_s)
        self._inference.closing = True
        self.dispatcher.close()
        closing = asyncio.create_task(self.server.close(grace_s))
        self._streams.close()
        await asyncio.gather(closing, self._responses.drain(grace_s), self._batches.close(grace_s))
        await self._metrics_server.close()
        for task in self._regular:
            task.cancel()
            await task.ended()
        await self._connections.stop_polling()
        await self._effects.close()
        await self._services.settling.finish()
        await self._services.parser.close()
        await self._deferred.close()
        await self._api_tasks.cancel()
        self._connections.close()
        # At the same time, so a database that hangs delays the end only once.
        ended = await asyncio.gather(
            self._operator_state.synchronise(),
            self._request_log.flush(),
            self._audit.flush(),
            self._history.save(),
            self._signing_in.close(),
            self._responses.close(),
            self._metering.close(),
            return_exceptions=True,
        )
        for problem in ended:
            if isinstance(problem, BaseException):
                log.error("not all was written at the end: %s", problem, exc_info=problem)
        await asyncio.gather(self.database.close(), self._responses_database.close())
        await asyncio.to_thread(self._tracer.close)
        await asyncio.to_thread(self._measured_sizes.write, self.dispatcher.fleet.measured)
        await self._activity_file.save()

    async def reload(self, files: ConfigurationFiles) -> None:
        """Read and use the configuration in `files`.

        Never raises. If anything fails, the configuration in force stays, and `/health` has the reason.
        """
        try:
            async with self._reloading:
                config, catalogue = files.read()
                self._check_aliases(files, config, catalogue)
                await self.reconfigure(config, catalogue)
        except Exception as problem:  # any error: an unexpected one must not end reloading
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
            log.info("configuration reloaded, nodes: %d", len(self.config.neurons))

    def _check_aliases(self, files: ConfigurationFiles, config: Config, catalogue: Catalogue) -> None:
        """Raises SettingsError for a new alias of a model that no node has, once every node has reported its models."""
        nodes = self.dispatcher.fleet.nodes
        names = {section.name for section in config.neurons}
        if config.discovery.dns is None and names <= {node.name for node in nodes if node.healthy}:
            listed = {model for node in nodes if node.name in names for model in node.residencies}
            files.check_aliases(config, catalogue, listed)

    async def reconfigure(self, config: Config, catalogue: Catalogue) -> None:
        """Use a new configuration. Running responses continue; addresses need a restart.

        Raises what `start` would raise, and then nothing has changed.
        """
        before, was_open = self.config, self._metering.is_open
        configured, config = config, self._with_discovered(config)
        if config.telemetry != before.telemetry:
            await asyncio.to_thread(open_tracer(config.telemetry, "cortex").close)  # is it usable after a restart?
        driver_of(config.ledger.database)  # is it, too?
        settings = DispatchSettings.of(config, catalogue)
        planned = self._connections.planned(config)
        await self._use_keys(config)
        # From here to the end of the changes nothing waits, and nothing should fail.
        leaving = self._connections.leave(planned)
        self.config, self._configured, self._catalogue = config, configured, catalogue
        self._services.config = config.gateway
        self._admission.prefix_sharing = config.gateway.prefix_sharing
        self._services.pictures.section = config.pictures
        self._responses.use(config.responses)
        self._batches.use(config.batches)
        self._routes.configure(config, is_open=self._metering.is_open)
        self._services.activity.configure(config.activity)
        self._request_log.retention_days = config.activity.log_retention_days
        logs.configure(config.gateway.log_format, config.gateway.log_level)
        self._connections.join(planned, self.dispatcher)
        self.dispatcher.reconfigure(settings)
        self._connections.start_polling(planned)
        record_changed_keys(self._audit, before.keys, config.keys)
        warn_about_restart(before, config)
        if self._metering.is_open != was_open or bool(before.keys) != bool(config.keys):
            self._warn_about_access()
        await asyncio.gather(*(poller.stop() for poller in leaving))

    async def _change_created(self, name: str, entry: ModelSpec | Alias | None) -> None:
        """Write an entry of the created models, or remove one, and use it at once. Raises OSError or SettingsError."""
        async with self._reloading:
            before = self._created_models.read()
            after = with_entry(before, name, entry)
            await asyncio.to_thread(self._created_models.write, after)
            catalogue = without_entries(self._catalogue, before)
            await self.reconfigure(self._configured, joined(catalogue, after))

    def _with_discovered(self, config: Config) -> Config:
        return msgspec.structs.replace(config, neurons=self._discovery.joined(config.neurons))

    async def _discover_nodes(self) -> None:
        while True:
            await asyncio.sleep(self.config.discovery.interval_s)
            await self._discovery.refresh(self._configured.discovery)
            async with self._reloading:
                config = self._with_discovered(self._configured)
                if config.neurons != self.config.neurons:
                    await self.reconfigure(self._configured, self._catalogue)
                    log.info("discovery changed the fleet, nodes: %d", len(config.neurons))

    async def _use_keys(self, config: Config) -> None:
        """Raises StoreError or SettingsError, and then nothing has changed."""
        check_library(config.sign_in)
        await self._metering.use(config)
        self._admission.meter = self._metering.meter
        await self._signing_in.use(config.sign_in)

    def _gauges(self) -> Iterator[GaugeSample]:
        yield from fleet_gauges(self.dispatcher.fleet, self.dispatcher.queue_depths, self.dispatcher.in_flight)
        for kind, name, unit, period, limit, left in self._metering.budget_levels():
            labels = {"kind": kind, "owner": name, "unit": unit, "period": period}
            yield GaugeSample("cortex_budget_limit", limit, **labels)
            yield GaugeSample("cortex_budget_left", left, **labels)

    def _warn_about_access(self) -> None:
        metering = self._metering
        warn_about_access(self.config, is_open=metering.is_open, has_keys=bool(metering.in_force.keys))

    async def _refresh_keys(self) -> None:
        """Apply the keys that the database has now. Raises `StoreError`."""
        async with self._reloading:
            was_open = self._metering.is_open
            await self._use_keys(self.config)
            self._routes.configure(self.config, is_open=self._metering.is_open)
            if self._metering.is_open != was_open:
                self._warn_about_access()

    async def _watch_keys(self) -> None:
        """Adopt the keys that other gateways and commands have written to the database."""
        with contextlib.suppress(StoreError):  # logged; those in force stay
            if await self._metering.have_keys_changed():
                await self._refresh_keys()

    async def _tick(self) -> None:
        await self._operator_state.before_tick()
        self.dispatcher.tick()
        self._history.history.sample(self.dispatcher)
        self._control.feed.tick()
        self._streams.tick(self.config.gateway.keepalive_s)
        measured = self.dispatcher.fleet.measured
        await asyncio.get_running_loop().run_in_executor(self._tick_thread, self._measured_sizes.write, measured)
