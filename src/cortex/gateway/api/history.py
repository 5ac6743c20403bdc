"""`/fleet/history`: the last hour or day of the gateway's traffic and of the fleet's memory, for operators."""

from __future__ import annotations

from cortex.gateway.api.parts import ApiRoute
from cortex.gateway.history.history import WINDOWS, History
from cortex.gateway.ledger.meter import Metering
from cortex.gateway.proxy.routes import json_response
from cortex.http.routing import Route, query
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response
from cortex.wire.errors import InvalidValue, shorten

PATH = "/fleet/history"


class HistoryRoutes:
    def __init__(self, history: History, metering: Metering) -> None:
        self._history = history
        self._metering = metering

    def routes(self) -> list[ApiRoute]:
        return [Route("GET", PATH, self._read)]

    def _read(self, exchange: Exchange) -> Response:
        self._metering.meter.authenticate_operator(exchange.request)
        wanted = query(exchange.request, "window") or "hour"
        window = next((each for each in WINDOWS if each == wanted), None)
        if window is None:
            raise InvalidValue(f"{shorten(wanted)} is no window; use {' or '.join(WINDOWS)}.", param="window")
        return json_response(self._history.as_json(window))
