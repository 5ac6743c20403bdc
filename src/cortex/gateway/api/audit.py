"""`/fleet/audit`: who changed what, when, and with which outcome. Operators only."""

from __future__ import annotations

import time

import msgspec

from cortex.gateway.api.parts import ApiRoute, DeferredResponses, number_in_query, time_in_query
from cortex.gateway.database import StoreError
from cortex.gateway.dispatch.operator.audit import AuditLog
from cortex.gateway.ledger.meter import Metering
from cortex.gateway.proxy.routes import json_response
from cortex.http.request import Request
from cortex.http.routing import Route, query
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response
from cortex.wire.errors import DatabaseUnavailable

PATH = "/fleet/audit"
MAX_LISTED = 1000


class AuditRoutes:
    """Serves the audit log."""

    def __init__(self, audit: AuditLog, metering: Metering, deferred: DeferredResponses) -> None:
        self._audit = audit
        self._metering = metering
        self._deferred = deferred

    def routes(self) -> list[ApiRoute]:
        return [Route("GET", PATH, self._respond)]

    def _respond(self, exchange: Exchange) -> None:
        self._metering.meter.authenticate_operator(exchange.request)
        self._deferred.respond(exchange, self._list(exchange.request))

    async def _list(self, request: Request) -> Response:
        until = time_in_query(request, "until", time.time() + 60)
        since = time_in_query(request, "since", 0)
        limit = number_in_query(request, "limit", 100, most=MAX_LISTED)
        try:
            entries = await self._audit.read(since, until, limit, query(request, "key") or "")
        except StoreError as error:
            raise DatabaseUnavailable(f"The audit log cannot be read: {error}.") from error
        shown = [msgspec.structs.asdict(entry) for entry in entries]
        return json_response({"entries": [{"at": entry.pop("at_ms") / 1000} | entry for entry in shown]})
