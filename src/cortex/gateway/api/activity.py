"""`/fleet/activity`: lists, streams and deletes recent and logged requests, and cancels running ones. For operators
also `/fleet/audit` (who changed what) and `/fleet/history`.

Operators see all requests. The owner of another key sees the requests of that key, without the names of nodes.
"""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Coroutine
from itertools import islice
from typing import Any

import msgspec

from cortex.gateway.api.live.event_streams import EventStreams
from cortex.gateway.api.parts import ApiRoute, ApiServices, number_in_query, time_in_query
from cortex.gateway.dispatch.operator.audit import AuditLog
from cortex.gateway.history import WINDOWS, History
from cortex.gateway.ledger.keys import KeySection
from cortex.gateway.proxy.accounting.activity import ActivityLog, Capture, RequestRecord
from cortex.gateway.proxy.accounting.request_log import Matches, RequestLog, SearchTooLong
from cortex.gateway.proxy.accounting.running import RunningRequest, RunningRequests
from cortex.gateway.proxy.routes import json_response
from cortex.http.request import Request
from cortex.http.routing import Route, query
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response
from cortex.wire import sse
from cortex.wire.errors import InvalidValue, RouteNotFound, shorten

PATH = "/fleet/activity"
EVENTS_PATH = f"{PATH}/events"
RUNNING_PATH = f"{PATH}/running"
MAX_LISTED = 1000


class ActivityRoutes:
    """Serves the gateway's activity log."""

    def __init__(
        self,
        api: ApiServices,
        activity: ActivityLog,
        request_log: RequestLog,
        running: RunningRequests,
        streams: EventStreams,
    ) -> None:
        self._api = api
        self._activity = activity
        self._log = request_log
        self._running = running
        self._streams = streams

    def routes(self) -> list[ApiRoute]:
        return [
            Route("GET", PATH, self._show_list),
            Route("DELETE", PATH, self._forget_matching),
            Route("GET", EVENTS_PATH, self._stream, has_head=False),
            Route("GET", RUNNING_PATH, self._list_running),
            Route("DELETE", f"{RUNNING_PATH}/{{request_id:.+}}", self._cancel),
            Route("GET", f"{PATH}/{{request_id:.+}}", self._one),
            Route("DELETE", f"{PATH}/{{request_id:.+}}", self._forget),
        ]

    def _key(self, exchange: Exchange) -> KeySection | None:
        return self._api.metering.meter.key(exchange.request)

    def _show_list(self, exchange: Exchange) -> Response | Coroutine[Any, Any, Response]:
        request, key = exchange.request, self._key(exchange)
        is_recent = query(request, "since") is None and query(request, "until") is None
        return self._list(request, key) if is_recent else self._logged(request, key)

    async def _forget_matching(self, exchange: Exchange) -> Response:
        self._api.authenticate_operator(exchange.request)
        return await self._removed(_filter(exchange.request))

    def _list(self, request: Request, key: KeySection | None) -> Response:
        """The newest requests that match. `after`: only those with a higher number; `before`: only with a lower."""
        limit = number_in_query(request, "limit", 100, most=MAX_LISTED)
        after = number_in_query(request, "after", 0, most=2**53)
        before = number_in_query(request, "before", 2**53, most=2**53)
        matches = _filter(request)
        found = (
            _as_json(record, key)
            for record in self._activity.newest_first()
            if after < record.number < before and _is_shown(record, key) and matches(record)
        )
        body = {"requests": list(islice(found, limit)), "next": self._activity.last_number}
        return json_response(body | {"log_retention_days": self._log.retention_days})

    async def _logged(self, request: Request, key: KeySection | None) -> Response:
        """The newest requests of the request log that match, between `since` and `until`."""
        if not self._log.retention_days:
            raise InvalidValue(
                "This gateway keeps no request log: leave out 'since' and 'until', or have the operator set "
                "log_retention_days under [activity].",
                param="since",
            )
        until = time_in_query(request, "until", time.time() + 60)
        since = time_in_query(request, "since", 0)
        limit = number_in_query(request, "limit", 100, most=MAX_LISTED)
        matches = _filter(request)
        try:
            found = await self._log.read(
                since, until, limit, lambda record: _is_shown(record, key) and matches(record), key_id=_only_of(key)
            )
        except SearchTooLong as error:
            raise InvalidValue(
                f"Fewer than {limit} of the newest {self._log.limits.searched} requests of this time match: ask for a "
                "shorter time, with 'since' and 'until', or for fewer with 'limit'.",
                param="since",
            ) from error
        return json_response({"requests": [_as_json(record, key) for record in found], "next": 0})

    async def _one(self, exchange: Exchange, request_id: str) -> Response:
        key = self._key(exchange)

        def matches(record: RequestRecord) -> bool:
            return record.id.decode() == request_id and _is_shown(record, key)

        found = next(filter(matches, self._activity.newest_first()), None)
        if found is None and self._log.retention_days:
            until = time.time() + 60
            logged = await self._log.read(0, until, 1, matches, key_id=_only_of(key), request_id=request_id)
            found = next(iter(logged), None)
        if found is None:
            raise RouteNotFound(f"There is no request {shorten(request_id)}; GET {PATH} lists those that are kept.")
        return json_response(_as_json(found, key, in_full=True))

    async def _forget(self, exchange: Exchange, request_id: str) -> Response:
        self._api.authenticate_operator(exchange.request)
        response = await self._removed(lambda record: record.id.decode() == request_id, request_id)
        if response == json_response({"removed": 0}):
            raise RouteNotFound(f"There is no request {shorten(request_id)} among those that are kept.")
        return response

    async def _removed(self, matches: Matches, request_id: str | None = None) -> Response:
        """Delete the matching requests, in memory and in the request log; only those of `request_id` if it is given."""
        num_removed = self._activity.forget(matches)
        if self._log.retention_days:
            num_removed = max(num_removed, await self._log.forget(matches, request_id=request_id))
        return json_response({"removed": num_removed})

    def _list_running(self, exchange: Exchange) -> Response:
        """Oldest first."""
        key = self._key(exchange)
        found = [_running_json(running, key) for _, running in self._running if _is_shown(running, key)]
        return json_response({"requests": found})

    def _cancel(self, exchange: Exchange, request_id: str) -> Response:
        """Cancel every request with this id that the key may see. Clients choose ids, so several may have the same."""
        key = self._key(exchange)
        by = "its owner" if key is not None and not key.operator else "the operator of this gateway"
        cancelled = [
            request
            for request, running in self._running
            if running.id.decode() == request_id and _is_shown(running, key)
        ]
        for request in cancelled:
            request.cancel(by)
        if not cancelled:
            raise RouteNotFound(f"No request {shorten(request_id)} runs; GET {RUNNING_PATH} lists those that do.")
        return json_response({"cancelled": len(cancelled)})

    def _stream(self, exchange: Exchange) -> None:
        """Send every request that ends from now on. A slow reader loses requests, not the connection."""
        key = self._key(exchange)
        matches = _filter(exchange.request)

        def send(record: RequestRecord) -> None:
            if not exchange.paused and _is_shown(record, key) and matches(record):
                exchange.write(sse.frame(msgspec.json.encode(_as_json(record, key)), "request"))

        self._streams.begin(exchange)
        self._streams.keep(exchange, self._activity.subscribe(send))


def _is_operator(key: KeySection | None) -> bool:
    return key is None or key.operator


def _is_shown(record: RequestRecord | RunningRequest, key: KeySection | None) -> bool:
    return key is None or key.operator or record.key_id == key.id


def _only_of(key: KeySection | None) -> str | None:
    """The id of the only key whose requests `key` may see; None for all."""
    return None if key is None or key.operator else key.id


def _filter(request: Request) -> Matches:
    """The filters of the query: `model` (a name, or a pattern with `*`), `key` (name or id), `status`."""
    model, key, status = (query(request, name) for name in ("model", "key", "status"))
    has_status = _status_filter(status) if status is not None else None

    def matches(record: RequestRecord) -> bool:
        return (
            (model is None or fnmatch.fnmatchcase(record.model, model))
            and (key is None or key in (record.key_name, record.key_id))
            and (has_status is None or has_status(record))
        )

    return matches


def _status_filter(text: str) -> Matches:
    if text == "ok":
        return lambda record: record.status < 400 and record.error_code is None and record.outcome == "complete"
    if text == "error":
        return lambda record: record.status >= 400 or record.error_code is not None
    if len(text) == 3 and text[0].isdigit() and (text[1:] == "xx" or (text.isascii() and text.isdigit())):
        low, high = (int(text[0]) * 100, int(text[0]) * 100 + 99) if text[1:] == "xx" else (int(text), int(text))
        return lambda record: low <= record.status <= high
    raise InvalidValue("Invalid value for 'status': use a status such as 200 or 5xx, or ok or error.", param="status")


def _as_json(record: RequestRecord, key: KeySection | None, *, in_full: bool = False) -> dict[str, Any]:
    """The record as plain data. Node, reason and the full error are for operators."""
    is_operator = _is_operator(key)
    usage = record.usage
    body: dict[str, Any] = {
        "id": record.id.decode(),
        "number": record.number,
        "time": round(record.ended_at - record.duration_s, 3),
        "key": record.key_name,
        "model": record.model,
        "node": record.node if is_operator else None,
        "dialect": record.dialect,
        "path": record.path.decode(),
        "status": record.status,
        "outcome": record.outcome,
        "queue_s": round(record.waited_s - record.load_s, 4),
        "load_s": round(record.load_s, 4),
        "ttft_s": _rounded(record.first_token_s),
        "duration_s": round(record.duration_s, 4),
        "tokens_per_s": _rounded(record.tokens_per_s),
        "prompt_tokens": usage.prompt_tokens if usage is not None else None,
        "cached_tokens": usage.cached_tokens if usage is not None else None,
        "completion_tokens": usage.completion_tokens if usage is not None else None,
        "reasoning_tokens": usage.reasoning_tokens if usage is not None else None,
        "energy_j": usage.energy_mj / 1000 if usage is not None else None,
        "dimensions": record.dimensions,
        "drafted_tokens": usage.drafted_tokens if usage is not None else None,
        "accepted_draft_tokens": usage.accepted_draft_tokens if usage is not None else None,
        "attempts": record.num_attempts,
        "class": record.request_class,
        "reason": record.reason if is_operator else None,
        "error": record.error_code,
        "error_message": record.error_message if is_operator else None,
    }
    if record.capture is not None:
        body["capture"] = _capture_json(record.capture) if in_full else True
    return body


def _running_json(running: RunningRequest, key: KeySection | None) -> dict[str, Any]:
    return {
        "id": running.id.decode(),
        "key": running.key_name,
        "model": running.model,
        "node": running.node if _is_operator(key) else None,
        "dialect": running.dialect,
        "path": running.path.decode(),
        "stream": running.stream,
        "phase": running.phase,
        "duration_s": round(running.duration_s, 4),
        "attempts": running.num_attempts,
        "class": running.request_class,
    }


def _capture_json(capture: Capture) -> dict[str, Any]:
    return {
        "request": capture.request.decode(errors="replace"),
        "request_bytes": capture.num_request_bytes,
        "response_end": capture.response_end.decode(errors="replace"),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


class AuditRoutes:
    """Serves the audit log."""

    def __init__(self, api: ApiServices, audit: AuditLog) -> None:
        self._api = api
        self._audit = audit

    def routes(self) -> list[ApiRoute]:
        return [Route("GET", "/fleet/audit", self._list)]

    async def _list(self, exchange: Exchange) -> Response:
        request = exchange.request
        self._api.authenticate_operator(request)
        until = time_in_query(request, "until", time.time() + 60)
        since = time_in_query(request, "since", 0)
        limit = number_in_query(request, "limit", 100, most=MAX_LISTED)
        entries = await self._audit.read(since, until, limit, query(request, "key") or "")
        shown = [msgspec.structs.asdict(entry) for entry in entries]
        return json_response({"entries": [{"at": entry.pop("at_ms") / 1000} | entry for entry in shown]})


class HistoryRoutes:
    def __init__(self, api: ApiServices, history: History) -> None:
        self._api = api
        self._history = history

    def routes(self) -> list[ApiRoute]:
        return [Route("GET", "/fleet/history", self._read)]

    def _read(self, exchange: Exchange) -> Response:
        self._api.authenticate_operator(exchange.request)
        wanted = query(exchange.request, "window") or "hour"
        window = next((each for each in WINDOWS if each == wanted), None)
        if window is None:
            raise InvalidValue(f"{shorten(wanted)} is not a window; use {' or '.join(WINDOWS)}.", param="window")
        return json_response(self._history.as_json(window))
