"""The routes of stored responses: `/v1/responses/{id}`, its input items, and its cancellation."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from cortex.gateway.ledger.keys import KeySection
from cortex.gateway.proxy.admission import AdmissionController, client_of
from cortex.gateway.proxy.deferred_responses import DeferredResponses
from cortex.gateway.proxy.routes import JSON_HEADERS, HttpRoute, json_response
from cortex.gateway.responses.background import BackgroundRuns, current_body
from cortex.gateway.responses.response_object import build_last_event, ended_body, head_of
from cortex.gateway.responses.store import ResponseStore
from cortex.gateway.responses.tables import StoredResponse
from cortex.http.request import Request
from cortex.http.routing import Route, query
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response
from cortex.parsing.items import StoredTexts
from cortex.parsing.parser import BodyParser
from cortex.wire import sse
from cortex.wire.errors import InvalidValue, ResponseNotFound, shorten

_ONE = "/v1/responses/{id}"
_MAX_PAGE = 100
_DEFAULT_PAGE = 20
_MAX_EVENT_NUMBER = 2**53


class StoredResponses:
    """Serves stored responses to the keys that made them."""

    def __init__(
        self,
        store: ResponseStore,
        background: BackgroundRuns,
        admission: AdmissionController,
        parser: BodyParser,
        deferred: DeferredResponses,
    ) -> None:
        self._store = store
        self._parser = parser
        self._background = background
        self._admission = admission
        self._deferred = deferred

    def routes(self) -> list[HttpRoute]:
        return [
            Route("GET", _ONE, partial(self._begin, self._show)),
            Route("DELETE", _ONE, partial(self._begin, self._delete)),
            Route("GET", f"{_ONE}/input_items", partial(self._begin, self._input_items)),
            Route("POST", f"{_ONE}/cancel", partial(self._begin, self._cancel)),
        ]

    def _begin(
        self,
        work: Callable[[Exchange, KeySection | None, str], Coroutine[Any, Any, Response | None]],
        exchange: Exchange,
        id: str,
    ) -> None:
        key = self._admission.meter.key(exchange.request)
        self._deferred.respond(exchange, work(exchange, key, id))

    async def _show(self, exchange: Exchange, key: KeySection | None, id: str) -> Response | None:
        """None when the exchange follows a stream."""
        if query(exchange.request, "stream") == "true":
            return await self._follow(exchange, _id_of(key), id)
        return _json(await self._body(_id_of(key), id))

    async def _read(self, key_id: str, id: str) -> StoredResponse:
        stored = await self._store.read(key_id, id)
        if stored is None:
            raise _not_found(id)
        return stored

    async def _body(self, key_id: str, id: str) -> bytes:
        """The response object as it is now."""
        run = self._background.find(key_id, id)
        if run is not None:
            return await run.shown_body()
        return current_body(await self._read(key_id, id), self._store.clock())

    async def _delete(self, _: Exchange, key: KeySection | None, id: str) -> Response:
        key_id = _id_of(key)
        if not await self._store.delete(key_id, id):
            raise _not_found(id)
        if self._background.find(key_id, id) is not None:
            self._background.forget(id)
        return json_response({"id": id, "object": "response", "deleted": True})

    async def _input_items(self, exchange: Exchange, key: KeySection | None, id: str) -> Response:
        """All input items of the conversation behind the response."""
        request, key_id = exchange.request, _id_of(key)
        chain = await self._store.read_chain(key_id, id) or [await self._read(key_id, id)]
        return await item_page(self._parser, request, client_of(key, request), [stored.texts for stored in chain])

    async def _cancel(self, _: Exchange, key: KeySection | None, id: str) -> Response:
        return _json(await self._cancelled(_id_of(key), id))

    async def _cancelled(self, key_id: str, id: str) -> bytes:
        run = self._background.find(key_id, id)
        if run is not None:
            run.cancel()
            return await run.shown_body()
        stored = await self._read(key_id, id)
        if not head_of(stored.body).background:
            raise InvalidValue(
                "Only a response with `background` can be cancelled; end another one by closing its connection.",
                param="response_id",
            )
        body = current_body(stored, self._store.clock())
        if not stored.is_finished:
            if head_of(body).status != "failed":
                body = ended_body(stored.body, "cancelled")
            if not await self._store.finish(id, key_id, head_of(body).status, body):
                return (await self._read(key_id, id)).body.encode()  # it has ended meanwhile
        return body

    async def _follow(self, exchange: Exchange, key_id: str, id: str) -> Response | None:
        """The events of a response from `starting_after` on; of one that has ended before, the last one."""
        starting_after = _number(exchange.request, "starting_after", -1, least=0, most=_MAX_EVENT_NUMBER)
        run = self._background.find(key_id, id)
        if run is not None and run.streams:
            run.follow(exchange, (), starting_after)
            return None
        body = await self._body(key_id, id)
        if head_of(body).status in ("queued", "in_progress"):
            raise InvalidValue(
                "stream: this response was made without `stream`, or another gateway runs it; poll it instead.",
                param="stream",
            )
        event = build_last_event(body, starting_after + 1)
        return Response(200, ((b"content-type", sse.CONTENT_TYPE.encode()),), event)


async def item_page(parser: BodyParser, request: Request, client: str, chain: Sequence[StoredTexts]) -> Response:
    """The page of input items that the query asks for. Raises InvalidValue."""
    limit = _number(request, "limit", _DEFAULT_PAGE, least=1, most=_MAX_PAGE)
    order = query(request, "order") or "desc"
    if order not in ("asc", "desc"):
        raise InvalidValue("order: it must be `asc` or `desc`.", param="order")
    after = query(request, "after")
    return _json(await parser.list_items(chain, client, limit=limit, ascending=order == "asc", after=after))


def _id_of(key: KeySection | None) -> str:
    return "" if key is None else key.id


def _json(body: bytes) -> Response:
    return Response(200, JSON_HEADERS, body)


def _number(request: Request, name: str, default: int, *, least: int, most: int) -> int:
    text = query(request, name)
    if text is None:
        return default
    # The length is checked first: reading a number of many digits takes long, or raises.
    if len(text) > len(str(most)) or not (text.isascii() and text.isdigit()) or not least <= int(text) <= most:
        raise InvalidValue(f"{name}: it must be a number from {least} to {most}.", param=name)
    return int(text)


def _not_found(id: str) -> ResponseNotFound:
    return ResponseNotFound(
        f"Response with id '{shorten(id)}' not found: it was not stored for this key, was deleted, or has expired.",
        param="response_id",
    )
