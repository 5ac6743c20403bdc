"""The orders of operators to the fleet: load, unload, pin and unpin a model, drain and undrain a node.

An order that takes a while is a job. The response follows when the job has ended, or at once with `wait: false`. With
`dry_run: true` nothing changes, and the response says what would.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from cortex.fleet.placement import explain
from cortex.fleet.topology import ModelOnNode
from cortex.gateway.api.jobs import Job, JobBoard, JobKind
from cortex.gateway.api.parts import ApiRoute, ApiServices, read_body
from cortex.gateway.dispatch.model_jobs import Watched, Watcher
from cortex.gateway.dispatch.operator.commands import OperatorCommands
from cortex.gateway.proxy.routes import json_response
from cortex.http.routing import Route
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response
from cortex.wire.errors import CortexError, CrossSiteRequest, InvalidValue, ModelNotFound, shorten
from cortex.wire.node.protocol import ModelState, NodeValue, Progress


class _Order(NodeValue, frozen=True, forbid_unknown_fields=True):
    """The optional body of an order."""

    node: str | None = None
    force: bool = False
    sleep: bool = False
    """Keep the weights of an unloaded model in host memory if there is room."""
    pinned: bool = True
    unpin: bool = False
    """Unload the model even if it is pinned."""
    wait: bool = True
    """Respond when the order is complete; otherwise at once, with the job."""
    dry_run: bool = False


_KINDS: dict[str, JobKind] = {"load": "load", "unload": "unload", "pin": "pin"}


class _NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of an order without options."""


class OrderRoutes:
    """Carries out orders, each as one job."""

    def __init__(
        self,
        api: ApiServices,
        operator: OperatorCommands,
        board: JobBoard,
        store: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """`store` returns when pins and drained nodes are written."""
        self._api = api
        self._operator = operator
        self._board = board
        self._store = store

    def routes(self) -> list[ApiRoute]:
        return [
            *(
                Route("POST", f"/fleet/models/{{name:.+}}/{order}", partial(self._carry_out, order=order))
                for order in ("load", "unload", "pin", "unpin")
            ),
            *(
                Route("POST", f"/fleet/nodes/{{name:.+}}/{order}", partial(self._drain_node, order=order))
                for order in ("drain", "undrain")
            ),
            Route("POST", "/fleet/profiles/{name:.+}/load", self._load_profile),
            Route("GET", "/unload", self._unload_by_get),
            Route("POST", "/api/models/unload", self._unload_all),
            Route("POST", "/api/models/unload/{name:.+}", self._unload_one),
        ]

    def _drain_node(self, exchange: Exchange, name: str, order: str) -> None:
        self._api.authenticate_operator(exchange.request)
        read_body(exchange.request.body, _NoOptions)
        self._respond_stored(exchange, self._drain(name, order))

    def _load_profile(self, exchange: Exchange, name: str) -> Response:
        """Begin to load all models of a profile; a job for each."""
        by = self._api.authenticate_operator(exchange.request)
        read_body(exchange.request.body, _NoOptions)
        profiles = self._api.dispatcher.catalogue.profiles
        if name not in profiles:
            known = f"there are {', '.join(profiles)}" if profiles else "add it under [profiles] in models.toml"
            raise ModelNotFound(f"There is no profile `{shorten(name)}`; {known}.", param="profile")
        models = [self._api.dispatcher.resolve(each).model_id for each in profiles[name]]
        started = [(model, *self._start_of_profile(model, by)) for model in models]
        orders = [{"model": model, "nodes": nodes, "job": job.as_json()} for model, job, nodes in started]
        return json_response({"profile": name, "models": orders}, 202)

    def _start_of_profile(self, model: str, by: str) -> tuple[Job, tuple[str, ...]]:
        """A model that cannot be loaded does not prevent the others."""
        try:
            return self._start(model, "load", _Order(), by)
        except CortexError as error:
            return self._board.failed("load", model, error, by=by), ()

    def _unload_by_get(self, exchange: Exchange) -> Response:
        """As in llama-swap. Any web page can make a browser send this, so a browser needs a key."""
        request = exchange.request
        is_browser = request.header(b"sec-fetch-site") or (request.text(b"user-agent") or "").startswith("Mozilla/")
        if is_browser and self._api.metering.meter.key(request) is None:
            raise CrossSiteRequest("A web page may have sent this request; send POST /api/models/unload instead.")
        return self._unload_all(exchange)

    def _unload_all(self, exchange: Exchange) -> Response:
        """Unload every model that is not pinned, once its requests have ended. Wakes no node."""
        by = self._api.authenticate_operator(exchange.request)
        nodes, why_away = self._api.dispatcher.fleet.nodes, self._api.dispatcher.why_away
        places = [node for node in nodes if node.takes_orders and why_away(node.name) is None]
        for target in [ModelOnNode(node.name, held.model_id) for node in places for held in node.active]:
            if not self._operator.is_pinned(target):
                self._start(target.model, "unload", _Order(node=target.node), by)
        return Response(200, ((b"content-type", b"text/plain; charset=utf-8"),), b"OK")

    def _unload_one(self, exchange: Exchange, name: str) -> Response:
        by = self._api.authenticate_operator(exchange.request)
        self.begin(self._api.dispatcher.resolve(name).model_id, "unload", by)
        return Response(200, ((b"content-type", b"text/plain; charset=utf-8"),), b"OK")

    def _carry_out(self, exchange: Exchange, name: str, order: str) -> Response | None:
        request = exchange.request
        by = self._api.authenticate_operator(request)
        details = read_body(request.body, _Order)
        if details.dry_run:
            exchange.on_status(None)  # nothing changes, so the audit log does not list it
        model = self._api.dispatcher.resolve(name).model_id
        if order == "unpin" or (order == "pin" and not details.pinned):
            if details.dry_run:
                raise InvalidValue("There is no dry run of an unpin: it loads and unloads nothing.", param="dry_run")
            nodes = self._operator.unpin(model, details.node)
            self._respond_stored(exchange, json_response({"model": model, "nodes": nodes}))
            return None
        if details.dry_run:
            return json_response({"dry_run": True} | self._preview(model, order, details))
        job, nodes = self._start(model, order, details, by)
        if details.unpin:  # before other gateways miss the model
            self._api.tasks.start(self._store(), "store unpinned models")
        if details.wait:
            job.on_end(lambda: self._respond_stored(exchange, job.response()))
        else:
            body = {"model": model, "nodes": nodes, "job": job.as_json()}
            self._respond_stored(exchange, json_response(body, 202))
        return None

    def _respond_stored(self, exchange: Exchange, response: Response) -> None:
        """Respond once the order is durable."""

        async def stored() -> Response:
            await self._store()
            return response

        self._api.deferred.respond(exchange, stored())

    def begin(self, model: str, order: Literal["load", "unload"], by: str) -> Job:
        """Carry out an order without options; its job reports the rest. Raises CortexError."""
        return self._start(model, order, _Order(), by)[0]

    def _drain(self, node: str, order: str) -> Response:
        self._operator.drain(node, drained=order == "drain")
        return json_response({"node": node, "drained": order == "drain"})

    def _preview(self, model: str, order: str, details: _Order) -> dict[str, Any]:
        """What the order would do. Changes nothing."""
        if order == "unload":
            targets = self._operator.targets_of_unload(model, details.node)
            fleet = self._api.dispatcher.fleet
            in_flight = {here.name: here.residencies[model].in_flight for here in fleet.nodes if here.name in targets}
            return {
                "model": model,
                "nodes": targets,
                "in_flight": in_flight,
                "pinned_on": [name for name in targets if self._operator.is_pinned(ModelOnNode(name, model))],
            }
        decision = self._operator.decide(model, details.node)
        return explain.as_json(decision) | {"at": time.time(), "text": explain.text(decision)}

    def _start(self, model: str, order: str, details: _Order, by: str) -> tuple[Job, tuple[str, ...]]:
        """Carry out the order; returns its job and the nodes that it concerns."""
        dispatcher = self._api.dispatcher
        kind = _KINDS[order]
        leaving = () if order == "unload" else dispatcher.leaving(model, details.node)
        if order != "unload" and not leaving and (asleep := self._operator.sleepers_for(model, details.node)):
            return self._start_after(asleep, dispatcher.when_awake, kind, model, details, by)
        try:
            nodes, awaited = self._begin(kind, model, details)
        except CortexError:
            if order != "load" or not leaving:
                raise
            # Decided once the fleet is seen without the model.
            names = [target.node for target in leaving]
            return self._start_after(names, partial(self._watch_unload, model), kind, model, details, by)
        targets = [ModelOnNode(name, model) for name in awaited]
        job = self._board.start(
            kind,
            model,
            nodes,
            by=by,
            awaited=awaited,
            read_stage=partial(self._stage, targets),
            cancel=partial(self._cancel, targets) if kind != "unload" else None,
        )
        self._follow(job, targets)
        return job, nodes

    def _begin(self, kind: JobKind, model: str, details: _Order) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Carry out the order; returns the nodes that it concerns, and those where it takes a while."""
        if kind == "unload":
            nodes = self._operator.unload(
                model, details.node, force=details.force, sleep=details.sleep, unpin=details.unpin
            )
            return nodes, nodes
        if kind == "load":
            decision = self._operator.load(model, details.node)
            nodes = (decision.node,) if decision.node else ()
            return nodes, () if decision.action == "route" else nodes
        nodes = self._operator.pin(model, details.node)
        return nodes, tuple(name for name in nodes if not self._api.dispatcher.is_ready(model, name))

    def _follow(self, job: Job, targets: Sequence[ModelOnNode]) -> None:
        """Report the ends of the loads or unloads to the job."""
        if job.kind == "pin":
            job.on_end(partial(self._unpin_if_failed, job, tuple(targets)))
        watched: Watched = "unload" if job.kind == "unload" else "load"
        for target in targets:
            self._api.dispatcher.watch(target, watched, partial(job.node_ended, target.node))

    def _start_after(
        self,
        nodes: Sequence[str],
        watch: Callable[[str, Watcher], None],
        kind: JobKind,
        model: str,
        details: _Order,
        by: str,
    ) -> tuple[Job, tuple[str, ...]]:
        """Carry out an order once `watch` has reported each of these nodes."""
        targets: list[ModelOnNode] = []
        before = [ModelOnNode(name, model) for name in nodes]

        def cancel() -> None:
            if targets:
                self._cancel(targets)
            else:
                job.end(None)

        job = self._board.start(
            kind,
            model,
            nodes,
            by=by,
            awaited=nodes,
            read_stage=lambda: self._stage(targets or before),
            cancel=cancel,
        )

        def begin() -> None:
            if job.ended_at is not None:
                return
            try:
                names, awaited = self._begin(kind, model, details)
            except CortexError as error:
                job.end(error)
                return
            targets.extend(ModelOnNode(name, model) for name in awaited)
            self._follow(job, targets)
            job.move(names, awaited)

        remaining = set(nodes)

        def reported(node: str, error: CortexError | None) -> None:
            remaining.discard(node)
            if error is not None:
                job.end(error)
            elif not remaining:
                asyncio.get_running_loop().call_soon(begin)

        for name in nodes:
            watch(name, partial(reported, name))
        return job, job.nodes

    def _watch_unload(self, model: str, node: str, watcher: Watcher) -> None:
        self._api.dispatcher.watch(ModelOnNode(node, model), "unload", watcher)

    def _cancel(self, targets: Sequence[ModelOnNode]) -> None:
        for target in targets:
            self._api.dispatcher.cancel_load(target)

    def _unpin_if_failed(self, job: Job, targets: Sequence[ModelOnNode]) -> None:
        """Remove a pin whose load failed or was cancelled, which would be retried forever."""
        if job.state != "done":
            self._api.dispatcher.change_pins(removed=targets)

    def _stage(self, targets: Sequence[ModelOnNode]) -> tuple[str, Progress | None]:
        """Stage and progress of the first node that still works on it."""
        fleet = self._api.dispatcher.fleet
        for name, model in targets:
            if self._api.dispatcher.why_away(name) is not None:
                return self._api.dispatcher.waking_stage([name]), None
            if victims := self._api.dispatcher.awaited_victims(ModelOnNode(name, model)):
                return f"unloading {', '.join(sorted(victims))}", None
            node = fleet.node(name)
            held = node.residencies.get(model) if node is not None else None
            if held is not None and held.state not in (ModelState.READY, ModelState.COLD):
                progress = held.status.progress
                return progress.finest_stage if progress is not None else str(held.state), progress
        return "waiting", None
