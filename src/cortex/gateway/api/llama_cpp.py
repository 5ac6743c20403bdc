"""llama.cpp's routes about models: `/models` with states, load, unload and events, and `/props`; and llama-swap's
`/running`.

Clients such as Open WebUI use them to show and to choose what is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from cortex.gateway.api.live.event_streams import EventStreams
from cortex.gateway.api.models import offered
from cortex.gateway.api.orders import OrderRoutes
from cortex.gateway.api.parts import ApiRoute, ApiServices, listing_key, read_body
from cortex.gateway.dispatch.event_log import EventLog
from cortex.gateway.ledger import keys
from cortex.gateway.ledger.keys import KeySection
from cortex.gateway.proxy.admission import resolve_listed
from cortex.gateway.proxy.routes import json_response
from cortex.http.routing import Route, query
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response
from cortex.wire import llama_cpp
from cortex.wire.errors import MissingModel
from cortex.wire.node.protocol import ModelState, ModelStatus

_STATUS_AFTER = {
    "load_started": "loading",
    "model_loaded": "loaded",
    "model_asleep": "sleeping",
    "model_unloaded": "unloaded",
    "load_failed": "unloaded",
    "load_cancelled": "unloaded",
}
"""By the kind of an event of the fleet."""

_RUNNING_STATE = {
    ModelState.READY: "ready",
    ModelState.LOADING: "starting",
    ModelState.RECOVERING: "starting",
    ModelState.UNLOADING: "stopping",
}
"""In llama-swap's terms, the most useful first."""


class _Order(msgspec.Struct, frozen=True):
    model: str = ""


class LlamaCppRoutes:
    """Lists for every key, loads and unloads for operators."""

    def __init__(
        self,
        api: ApiServices,
        orders: OrderRoutes,
        open_paths: Sequence[bytes],
        event_log: EventLog,
        streams: EventStreams,
    ) -> None:
        self._event_log = event_log
        self._streams = streams
        self._api = api
        self._orders = orders
        self._open_paths = open_paths
        self._created = int(time.time())

    def routes(self) -> list[ApiRoute]:
        return [
            Route("GET", "/models", self._show_list),
            Route("POST", "/models/load", partial(self._order, order="load")),
            Route("POST", "/models/unload", partial(self._order, order="unload")),
            Route("GET", "/models/sse", self._stream, has_head=False),
            Route("GET", "/props", self._show_props),
            Route("GET", "/running", self._show_running),
        ]

    def _order(self, exchange: Exchange, order: Literal["load", "unload"]) -> Response:
        by = self._api.authenticate_operator(exchange.request)
        model = self._api.dispatcher.resolve(_named(read_body(exchange.request.body, _Order).model)).model_id
        self._orders.begin(model, order, by)
        return json_response({"success": True})

    def _key(self, exchange: Exchange) -> KeySection | None:
        return listing_key(self._api.metering.meter, exchange.request, self._open_paths)

    def _show_list(self, exchange: Exchange) -> Response:
        return json_response(self._list(self._key(exchange)))

    def _show_props(self, exchange: Exchange) -> Response:
        key, name = self._key(exchange), query(exchange.request, "model")
        return json_response(llama_cpp.router_props() if name is None else self._props(name, key))

    def _show_running(self, exchange: Exchange) -> Response:
        fleet, key = self._api.dispatcher.fleet, self._api.metering.meter.key(exchange.request)
        entries = []
        for spec in offered(fleet, with_unlisted=True):
            states = {_RUNNING_STATE[held.state] for held in self._held(spec.id) if held.state in _RUNNING_STATE}
            if states and keys.may_use(key, spec.id):
                state = next(each for each in _RUNNING_STATE.values() if each in states)
                about = {"name": spec.display_name or "", "description": spec.description or ""}
                ttl_s = fleet.rules.ttl_s if spec.ttl_s is None else spec.ttl_s
                entries.append({"model": spec.id, "state": state, "ttl": int(ttl_s), **about})
        return json_response({"running": entries})

    def _list(self, key: KeySection | None) -> dict[str, Any]:
        fleet, may_use = self._api.dispatcher.fleet, partial(keys.may_use, key)
        return llama_cpp.model_list(
            llama_cpp.entry(spec.id, self._held(spec.id), self._created) for spec in offered(fleet) if may_use(spec.id)
        )

    def _props(self, name: str, key: KeySection | None) -> dict[str, Any]:
        model = resolve_listed(self._api.dispatcher, key, _named(name), "/models").model_id
        best = max(self._held(model), key=lambda status: status.state is ModelState.READY, default=None)
        return llama_cpp.props(best or ModelStatus(id=model, state=ModelState.COLD), name)

    def _stream(self, exchange: Exchange) -> None:
        """Send changes from now on. A slow reader loses some."""
        key = self._api.metering.meter.key(exchange.request)

        def send(event: dict[str, Any]) -> None:
            status, model = _STATUS_AFTER.get(event["kind"]), event.get("model")
            if status is not None and model is not None and keys.may_use(key, model) and not exchange.paused:
                is_failed = event["kind"] == "load_failed"
                exchange.write(llama_cpp.status_event(model, status, is_failed=is_failed))

        self._streams.begin(exchange)
        self._streams.keep(exchange, self._event_log.subscribe(send))

    def _held(self, model: str) -> list[ModelStatus]:
        """The model on each node that has it."""
        return [
            node.residencies[model].status for node in self._api.dispatcher.fleet.nodes if model in node.residencies
        ]


def _named(name: str) -> str:
    if not name:
        raise MissingModel("No model is named; add `model` with a name from GET /models.", param="model")
    return name
