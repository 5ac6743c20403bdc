"""The routes other than inference: models, status, explanations and events; parts of the API serve the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from cortex import __version__
from cortex.fleet.catalogue import Resolution
from cortex.fleet.placement import explain
from cortex.fleet.placement.decision import Origin
from cortex.gateway.api import models
from cortex.gateway.api.health import GatewayHealth, is_ready
from cortex.gateway.api.live.event_streams import EventStreams
from cortex.gateway.api.live.fleet_feed import FleetFeed, node_statuses
from cortex.gateway.api.live.public_view import FleetView
from cortex.gateway.api.parts import ApiRoute, ApiServices, listing_key
from cortex.gateway.dispatch.event_log import EventLog
from cortex.gateway.dispatch.operator.audit import MAX_DETAIL, AuditLog
from cortex.gateway.dispatch.view import DispatchView
from cortex.gateway.ledger import keys
from cortex.gateway.ledger.meter import ANONYMOUS
from cortex.gateway.proxy.admission import resolve_listed
from cortex.gateway.proxy.listener import OLLAMA_LISTINGS
from cortex.gateway.proxy.redaction import shown_to
from cortex.gateway.proxy.routes import HttpRoute, error_response, family_of, json_response
from cortex.http.cross_site import CrossSiteCheck
from cortex.http.request import Request
from cortex.http.routing import Route, path_of, query
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response
from cortex.system.build import build_information
from cortex.wire import sse
from cortex.wire.error_encoding import Family
from cortex.wire.errors import CortexError, InvalidAPIKey, NodeNotFound
from cortex.wire.fields.body import check_content_type
from cortex.wire.model_list import model_list

MAX_LISTED_AT_ONCE = 200
"""Up to this many models on nodes, the list of models is made on the loop's thread, within milliseconds."""

READ_BY_POST = frozenset({"/api/show"})
"""Paths whose POST changes nothing."""
CHANGED_BY_GET = frozenset({"/unload"})


class Control:
    """Serves control requests from the dispatcher's state. Owns nothing but the feed of the nodes."""

    def __init__(
        self,
        api: ApiServices,
        event_log: EventLog,
        health: GatewayHealth,
        cross_site: CrossSiteCheck,
        streams: EventStreams,
        routes: Iterable[ApiRoute],
        open_paths: Sequence[bytes],
        audit: AuditLog,
    ) -> None:
        """`routes`: those of the other parts. `open_paths` need no key. `audit` records changes."""
        self._audit = audit
        self._open_paths = open_paths
        self._dispatcher: DispatchView = api.dispatcher
        self._event_log = event_log
        self._metering = api.metering
        self._cross_site = cross_site
        self._gateway_health = health
        self.feed = FleetFeed(api.dispatcher)
        """Ticked by the gateway."""
        self._deferred = api.deferred
        self._streams = streams
        self._created = int(time.time())
        self._routes = tuple(routes)

    def routes(self) -> list[HttpRoute]:
        """Those of the other parts, which may change something, and its own."""
        own: list[ApiRoute] = [
            Route("GET", "/health", self._health),
            Route("GET", "/ready", self._ready),
            Route("GET", "/version", self._version),
            Route("GET", "/v1/models", self._list_models),
            Route("GET", "/v1/models/{name:.+}", self._model),
            Route("GET", "/fleet/status", self._status),
            Route("GET", "/fleet/decisions", self._decisions),
            Route("GET", "/fleet/events", self._stream_events, has_head=False),
            Route("GET", "/fleet/explain/{name:.+}", self._explain),
        ]
        return [
            *(self._served(route, has_effects=True) for route in self._routes),
            *(self._served(route, has_effects=False) for route in own),
        ]

    def _served(self, route: ApiRoute, *, has_effects: bool) -> HttpRoute:
        return route.served_by(partial(self._serve, route, has_effects))

    def _serve(self, route: ApiRoute, has_effects: bool, exchange: Exchange, /, **values: str) -> None:
        """Serve a request that is not inference; errors are in the dialect of its path."""
        request = exchange.request
        try:
            if request.path not in self._open_paths:
                self._metering.meter.authenticate(request)
            is_read = request.method in (b"GET", b"HEAD") and route.path not in CHANGED_BY_GET
            if has_effects and not is_read and route.path not in READ_BY_POST:
                self._record(exchange)
            self._reject_cross_site(request, route, has_effects=has_effects)
            served = route.handler(exchange, **values)
            if served is None:
                return
            if not isinstance(served, Response):
                self._deferred.respond(exchange, served)
                return
            response = served
        except InvalidAPIKey as error:
            response = error_response(error, _family_of(request))
        except CortexError as error:
            key = None if request.path in self._open_paths else self._metering.meter.key(request)
            response = error_response(shown_to(key, error), _family_of(request))
        exchange.respond(*response)

    def _record(self, exchange: Exchange) -> None:
        """Record the request, which may change something, with the status of its response."""
        request, key = exchange.request, self._metering.meter.key(exchange.request)
        record = partial(
            self._audit.record,
            f"{request.method.decode('latin-1')} {path_of(request)}",
            key_id="" if key is None else key.id,
            key_name=ANONYMOUS if key is None else key.name,
            client=request.client,
            detail=request.body[:MAX_DETAIL].decode("utf-8", "replace"),
        )
        exchange.on_status(lambda status: record(status=status))

    def _reject_cross_site(self, request: Request, route: ApiRoute, *, has_effects: bool) -> None:
        """Raise CrossSiteRequest or UnsupportedMediaType for a request that another site's page may have sent.

        `has_effects`: the request may change something. Otherwise the route itself reports the error."""
        host = _text(request.header(b"host"))
        is_public = request.path in (*self._open_paths, *OLLAMA_LISTINGS) or route.path.startswith("/v1/")
        if not is_public and self._metering.meter.key(request) is None:
            self._cross_site.check_host(host)
        if request.method in (b"GET", b"HEAD"):
            return
        self._cross_site.check_origin(_text(request.header(b"origin")), host, _text(request.header(b"sec-fetch-site")))
        is_undeclared = not _family_of(request).declares_bodies and request.header(b"origin") is None
        if has_effects and request.method != b"DELETE" and not is_undeclared:
            check_content_type(_text(request.header(b"content-type")), required=True)

    def _health(self, exchange: Exchange) -> Response:
        """The gateway runs; the body says how well."""
        nodes = self._dispatcher.fleet.nodes
        return json_response(self._gateway_health.body(nodes, for_operator=self._is_operator(exchange.request)))

    def _ready(self, exchange: Exchange) -> Response:
        """The same with status 503 while no node takes requests, for load balancers."""
        nodes = self._dispatcher.fleet.nodes
        body = self._gateway_health.body(nodes, for_operator=self._is_operator(exchange.request))
        return json_response(body, 200 if is_ready(nodes) else 503)

    def _version(self, exchange: Exchange) -> Response:  # noqa: ARG002
        return json_response({"name": "cortex", **build_information()})

    def _is_operator(self, request: Request) -> bool:
        try:
            self._metering.meter.authenticate_operator(request)
        except CortexError:
            return False
        return True

    def _view(self, request: Request) -> FleetView:
        return FleetView(self._is_operator(request), self._metering.meter.key(request))

    def _list_models(self, exchange: Exchange) -> Response | Coroutine[Any, Any, Response]:
        """The list. A long one is made on another thread, from a snapshot of the fleet."""
        key = listing_key(self._metering.meter, exchange.request, self._open_paths)
        view = FleetView(self._is_operator(exchange.request), key)
        fleet, feasible_on = self._dispatcher.fleet, self._dispatcher.feasibility().nodes

        def make() -> Response:
            may_use = partial(keys.may_use, key)
            listed = models.listing(
                fleet,
                feasible_on,
                self._created,
                may_use,
                for_operator=view.is_operator,
                with_unlisted=query(exchange.request, "unlisted") == "true",
            )
            return json_response(model_list(list(map(view.model, listed)), partial(query, exchange.request)))

        if sum(len(node.residencies) for node in fleet.nodes) <= MAX_LISTED_AT_ONCE:
            return make()
        return asyncio.to_thread(make)

    def _resolve(self, request: Request, name: str) -> Resolution:
        """Raises ModelNotFound, also for a model that the key may not use."""
        return resolve_listed(self._dispatcher, self._metering.meter.key(request), name, "/v1/models")

    def _model(self, exchange: Exchange, name: str) -> Response:
        request = exchange.request
        resolution = self._resolve(request, name)
        fleet, feasible_on = self._dispatcher.fleet, self._dispatcher.feasibility().nodes
        view = self._view(request)
        entry = view.model(
            models.entry(fleet, resolution.spec, feasible_on, self._created, for_operator=view.is_operator)
        )
        if resolution.alias is not None:
            entry |= {"id": name, "alias_of": resolution.model_id}
        return json_response(entry)

    def _status(self, exchange: Exchange) -> Response:
        depths = self._dispatcher.queue_depths
        view = self._view(exchange.request)
        nodes = view.nodes(node_statuses(self._dispatcher.fleet))
        waiting = view.waiting(depths)
        found = {model: self._event_log.why_waiting(model) for model in waiting}
        reasons = {model: view.decision(each)["outcome"] for model, each in found.items() if each is not None}
        return json_response({"version": __version__, "nodes": nodes, "waiting": waiting, "waiting_reasons": reasons})

    def _decisions(self, exchange: Exchange) -> Response:
        """The latest decisions, and what else happened in the fleet; of one model with `model`."""
        model, view = query(exchange.request, "model"), self._view(exchange.request)

        def of_model(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [each for each in records if model is None or each.get("model") == model]

        events = [shown for event in of_model(self._event_log.events) for shown in view.events(event)]
        return json_response({"decisions": view.decisions(of_model(self._event_log.decisions)), "events": events})

    def _explain(self, exchange: Exchange, name: str) -> Response:
        """What would be decided for a request, or with `origin=operator` for an order; with `node` for that node."""
        request = exchange.request
        resolution = self._dispatcher.resolve(name) if self._is_operator(request) else self._resolve(request, name)
        origin: Origin = "background" if resolution.background else "request"
        if query(request, "origin") == "operator":
            origin = "operator"
        view, node = self._view(request), query(request, "node")
        if view.is_restricted and node is not None:
            raise NodeNotFound("This key sees its models, but no nodes; leave out 'node'.", param="node")
        decision = self._dispatcher.explain(resolution.model_id, origin, only_on=node)
        queued = {} if view.is_restricted else self._dispatcher.queued(resolution.model_id)
        text = "\n".join((explain.text(decision), *_queue_lines(queued)))
        body = explain.as_json(decision) | {"at": time.time(), "text": text, "queued": queued}
        return json_response(view.decision(body))

    def _stream_events(self, exchange: Exchange) -> None:
        """Stream events from now on, on request with the state of every node. A slow reader loses events, not the
        connection. Reasons of failures are for operators."""
        view, with_nodes = self._view(exchange.request), query(exchange.request, "nodes") is not None

        def send(event: dict[str, Any]) -> None:
            for shown in view.events(event) if not exchange.paused else ():
                exchange.write(sse.frame(msgspec.json.encode(shown), shown["kind"]))

        self._streams.begin(exchange)
        unsubscribe = self._event_log.subscribe(send)
        stop_feed = self.feed.follow(exchange, view) if with_nodes else lambda: None

        def ended() -> None:
            unsubscribe()
            stop_feed()

        self._streams.keep(exchange, ended)


def _text(header: bytes | None) -> str | None:
    return None if header is None else header.decode("latin-1")


def _family_of(request: Request) -> Family:
    return family_of(request.path, request.header)


def _queue_lines(queued: dict[str, dict[str, int]]) -> Iterator[str]:
    """The waiting requests, as text. A request waits for those of its class and of higher ones."""
    for node, counts in queued.items():
        listed = ", ".join(f"{number} {name}" for name, number in reversed(counts.items()))
        place = f"for a slot on {node}" if node else "at the gateway for the model"
        yield f"Requests that wait {place}, by class: {listed}."
