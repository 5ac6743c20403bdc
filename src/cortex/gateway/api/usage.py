"""`/fleet/usage`: requests, tokens and their cost by day, key, group, model or node, as JSON or CSV.

Operators see all of it, or with `key` one key. The owner of another key sees the usage of that key.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, get_args

import msgspec

from cortex.gateway.api.parts import ApiRoute, ApiServices, time_in_query
from cortex.gateway.ledger.store import GroupBy
from cortex.gateway.ledger.usage_report import UsageRow, as_csv, report
from cortex.gateway.proxy.routes import json_response
from cortex.http.request import Request
from cortex.http.routing import Route, query
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response
from cortex.wire.errors import InvalidValue, OperatorOnly

PATH = "/fleet/usage"
CSV_PATH = f"{PATH}.csv"
DEFAULT_SPAN_S = 30 * 86400.0
_GROUPS: tuple[GroupBy, ...] = get_args(GroupBy)
_CSV_HEADERS = (
    (b"content-type", b"text/csv; charset=utf-8"),
    (b"content-disposition", b'attachment; filename="cortex-usage.csv"'),
)


class UsageRoutes:
    """Reads the ledger, off the event loop."""

    def __init__(self, api: ApiServices) -> None:
        self._api = api

    def routes(self) -> list[ApiRoute]:
        return [Route("GET", PATH, self._read), Route("GET", CSV_PATH, partial(self._read, is_csv=True))]

    async def _read(self, exchange: Exchange, *, is_csv: bool = False) -> Response:
        request = exchange.request
        group = _group(query(request, "by") or "day")
        until = time_in_query(request, "until", time.time() + 60)
        since = time_in_query(request, "since", until - DEFAULT_SPAN_S)
        key_id = self._shown_key(request, group)
        ledger, catalogue = self._api.metering.ledger, self._api.dispatcher.fleet.catalogue
        spends = await ledger.usage(group, since=since, until=until, key_id=key_id) if ledger is not None else []
        rows = report(group, spends, catalogue.cost)
        if is_csv or b"text/csv" in (request.header(b"accept") or b""):
            return Response(200, _CSV_HEADERS, as_csv(group, rows).encode())
        body = {"by": group, "since": since, "until": until, "is_recorded": ledger is not None}
        return json_response(body | {"rows": [_as_json(row) for row in rows]})

    def _shown_key(self, request: Request, group: GroupBy) -> str | None:
        """The id of the only key whose usage is shown; None for all."""
        key = self._api.metering.meter.key(request)
        if key is not None and not key.operator:
            if group == "node":
                raise OperatorOnly("Usage by node is for operators; use an operator's key.")
            return key.id
        wanted = query(request, "key")
        if wanted is None:
            return None
        for account in self._api.metering.ledger.accounts if self._api.metering.ledger is not None else ():
            if wanted in (account.key.id, account.key.name):
                return account.key.id
        return wanted  # usage of a revoked key stays recorded under its id


def _group(name: str) -> GroupBy:
    for group in _GROUPS:
        if group == name:
            return group
    raise InvalidValue(f"Invalid value for 'by': use one of {', '.join(_GROUPS)}.", param="by")


def _as_json(row: UsageRow) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(row)
    return values | {"total_tokens": row.total_tokens, "cost": round(row.cost, 6), "energy_wh": round(row.energy_wh, 6)}
