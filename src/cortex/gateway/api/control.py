"""The routes beside inference: models, status, explanations, events, and the operator's orders."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from urllib.parse import parse_qs, unquote

import msgspec

from cortex import __version__
from cortex.fleet import explain
from cortex.fleet.topology import ModelOnNode, Node
from cortex.gateway.api import models
from cortex.gateway.api.health import GatewayHealth
from cortex.gateway.dispatch.dispatcher import Dispatcher
from cortex.gateway.dispatch.event_log import EventLog
from cortex.gateway.dispatch.operator_commands import OperatorCommands
from cortex.gateway.ledger import keys
from cortex.gateway.ledger.meter import Meter
from cortex.gateway.proxy.listener import OPEN_PATHS
from cortex.gateway.proxy.redaction import shown_to
from cortex.gateway.proxy.routes import ROUTES, error_response, family_of, json_response
from cortex.http.request import Request
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response
from cortex.wire import sse
from cortex.wire.errors import (
    CortexError,
    Family,
    InvalidAPIKey,
    InvalidValue,
    MalformedJSON,
    MethodNotAllowed,
    ModelNotFound,
    RouteNotFound,
    shorten,
)
from cortex.wire.node import ModelState, SleepOption

_EVENT_HEADERS = (
    (b"content-type", sse.CONTENT_TYPE.encode()),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_ORDERS = ("load", "unload", "pin", "unpin")


class _Order(SleepOption, frozen=True):
    """The optional body of an operator's order."""

    node: str | None = None
    force: bool = False
    pinned: bool = True


class Control:
    """Serves control requests from the dispatcher's state. Owns only the event streams."""

    def __init__(self, dispatcher: Dispatcher, event_log: EventLog, meter: Meter, health: GatewayHealth) -> None:
        self._dispatcher = dispatcher
        self._event_log = event_log
        self._operator = OperatorCommands(dispatcher, event_log)
        self.meter = meter
        """Replaced by a reload."""
        self._gateway_health = health
        self._created = int(time.time())
        self._pages: dict[str, Callable[[Request], Response]] = {
            "/": self._index,
            "/health": self._health,
            "/v1/models": self._models,
            "/fleet/status": self._status,
            "/fleet/decisions": self._decisions,
        }

    def handle(self, exchange: Exchange) -> None:
        """Serve a request that is not inference; errors are in the dialect of its path."""
        request = exchange.request
        try:
            if request.path not in OPEN_PATHS:
                self.meter.authenticate(request)
            path = unquote(request.path.decode("latin-1"))
            if path == "/fleet/events":
                _expect(request, b"GET")
                self._stream_events(exchange)
                return
            model, _, order = path.removeprefix("/fleet/models/").rpartition("/")
            if path.startswith("/fleet/models/") and model and order in _ORDERS:
                _expect(request, b"POST")
                self.meter.authenticate_operator(request)
                self._order(exchange, model, order)
                return
            response = self._page(request, path)
        except InvalidAPIKey as error:
            response = error_response(error, _family_of(request))
        except CortexError as error:
            key = None if request.path in OPEN_PATHS else self.meter.key(request)
            response = error_response(shown_to(key, error), _family_of(request))
        exchange.respond(*response)

    def _page(self, request: Request, path: str) -> Response:
        page = self._pages.get(path.rstrip("/") or "/")
        if page is not None:
            _expect(request, b"GET", b"HEAD")
            return page(request)
        if path.startswith("/v1/models/"):
            _expect(request, b"GET", b"HEAD")
            return self._model(request, path.removeprefix("/v1/models/"))
        if path.startswith("/fleet/explain/"):
            _expect(request, b"GET", b"HEAD")
            return self._explain(path.removeprefix("/fleet/explain/"))
        raise RouteNotFound(f"There is no {shorten(path)}; GET / lists the routes.")

    def _index(self, request: Request) -> Response:  # noqa: ARG002
        return json_response(
            {
                "name": "cortex",
                "version": __version__,
                "what": "One OpenAI and Anthropic endpoint over a fleet of GPU hosts.",
                "inference": [path.decode() for path in ROUTES],
                "models": "/v1/models",
                "fleet": ["/fleet/status", "/fleet/decisions", "/fleet/events", "/fleet/explain/{model}"],
                "health": "/health",
            }
        )

    def _health(self, request: Request) -> Response:
        nodes = {node.name: "up" if node.healthy else "down" for node in self._dispatcher.fleet.nodes}
        return json_response(self._gateway_health.body(nodes, for_operator=self._is_operator(request)))

    def _is_operator(self, request: Request) -> bool:
        try:
            self.meter.authenticate_operator(request)
        except CortexError:
            return False
        return True

    def _models(self, request: Request) -> Response:
        may_use = partial(keys.may_use, self.meter.key(request))
        fleet, feasible_on = self._dispatcher.fleet, self._dispatcher.feasible_on
        return json_response(models.listing(fleet, feasible_on, self._created, may_use))

    def _model(self, request: Request, name: str) -> Response:
        resolution = self._dispatcher.resolve(name)
        if not keys.may_use(self.meter.key(request), resolution.model_id):
            raise ModelNotFound("There is no such model for this key; GET /v1/models lists those that it may use.")
        entry = models.entry(self._dispatcher.fleet, resolution.spec, self._dispatcher.feasible_on, self._created)
        if resolution.alias is not None:
            entry |= {"id": name, "alias_of": resolution.model_id}
        return json_response(entry)

    def _status(self, request: Request) -> Response:  # noqa: ARG002
        depths = self._dispatcher.queue_depths
        nodes = [_node_status(node) for node in self._dispatcher.fleet.nodes]
        return json_response({"version": __version__, "nodes": nodes, "waiting": depths})

    def _decisions(self, request: Request) -> Response:
        model = _query(request, "model")
        decisions = [each for each in self._event_log.decisions if model is None or each["model"] == model]
        return json_response({"decisions": decisions})

    def _explain(self, name: str) -> Response:
        resolution = self._dispatcher.resolve(name)
        decision = self._dispatcher.explain(resolution.model_id, "background" if resolution.background else "request")
        return json_response(explain.as_json(decision) | {"at": time.time(), "text": explain.text(decision)})

    def _order(self, exchange: Exchange, name: str, order: str) -> None:
        """Carry out an operator's order; the response follows when it is complete."""
        details = _read_order(exchange.request.body)
        model = self._dispatcher.resolve(name).model_id
        if order == "unload":
            places = self._operator.unload(model, details.node, force=details.force, sleep=details.sleep)
            self._respond_when_done(exchange, model, places)
        elif order == "load":
            decision = self._operator.load(model, details.node)
            places = (decision.node,) if decision.node else ()
            self._respond_when_done(exchange, model, () if decision.action == "route" else places, places)
        elif order == "unpin" or not details.pinned:
            freed = self._operator.unpin(model, details.node)
            exchange.respond(*json_response({"model": model, "nodes": freed}))
        else:
            places = self._operator.pin(model, details.node)
            starting = [name for name in places if not self._dispatcher.is_ready(model, name)]
            self._respond_when_done(exchange, model, starting, places)

    def _respond_when_done(
        self, exchange: Exchange, model: str, awaited: Sequence[str], places: Sequence[str] | None = None
    ) -> None:
        """Respond once every node in `awaited` is done, or as soon as one has failed."""
        remaining = set(awaited)
        success = json_response({"model": model, "nodes": places if places is not None else awaited})

        def ended(node: str, error: CortexError | None) -> None:
            remaining.discard(node)
            if error is not None:
                respond(error_response(error, Family.OPENAI))
            elif not remaining:
                respond(success)

        def respond(response: Response) -> None:
            if not exchange.closed:
                exchange.respond(*response)

        if not remaining:
            respond(success)
        for node in awaited:
            self._dispatcher.watch(ModelOnNode(node, model), partial(ended, node))

    def _stream_events(self, exchange: Exchange) -> None:
        """Stream events from now on. A slow reader loses events, not the connection."""

        def send(event: dict[str, Any]) -> None:
            if not exchange.paused:
                exchange.write(sse.frame(msgspec.json.encode(event), event["kind"]))

        exchange.start(200, _EVENT_HEADERS)
        exchange.write(sse.COMMENT)
        exchange.on_disconnect(self._event_log.subscribe(send))


def _read_order(body: bytes) -> _Order:
    try:
        return msgspec.json.decode(body, type=_Order) if body.strip() else _Order()
    except msgspec.ValidationError as problem:
        raise InvalidValue(
            f'The body may hold "node", "force", "sleep" and "pinned": {shorten(str(problem))}.'
        ) from problem
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise MalformedJSON(f"The body is not valid JSON: {shorten(str(problem))}") from problem


def _expect(request: Request, *methods: bytes) -> None:
    if request.method not in methods:
        allowed = b" or ".join(methods).decode()
        raise MethodNotAllowed(
            f"{shorten(request.path.decode('latin-1'))} takes {allowed} only.",
            details={"allowed_methods": [method.decode() for method in methods]},
        )


def _query(request: Request, name: str) -> str | None:
    values = parse_qs(request.query.decode("latin-1")).get(name)
    return values[0] if values else None


def _node_status(node: Node) -> dict[str, Any]:
    return {
        "name": node.name,
        "kind": "neuron" if node.has_lifecycle else "openai",
        "up": node.healthy,
        "draining": node.draining,
        "problem": node.problem,
        "missed_polls": node.missed_polls,
        "dialects": node.dialects,
        "devices": [msgspec.to_builtins(device) for device in node.devices],
        "models": [
            msgspec.to_builtins(held.status) | {"in_flight": held.in_flight, "pinned": held.pinned}
            for held in node.residencies.values()
            if held.state is not ModelState.COLD
        ],
        "cold_models": [held.model_id for held in node.residencies.values() if held.state is ModelState.COLD],
    }


def _family_of(request: Request) -> Family:
    return family_of(request.path, is_anthropic=request.header(b"anthropic-version") is not None)
