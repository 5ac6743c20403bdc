"""The routes of conversations: `/v1/conversations`, one of them, and its items."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Raw

from cortex.gateway.proxy.admission import AdmissionController, client_of
from cortex.gateway.proxy.deferred_responses import DeferredResponses
from cortex.gateway.proxy.routes import HttpRoute, json_response
from cortex.gateway.responses import conversation_tables as tables
from cortex.gateway.responses.api import item_page
from cortex.gateway.responses.conversation_tables import ConversationRow, Owner
from cortex.gateway.responses.response_object import new_response_id
from cortex.gateway.responses.store import ResponseStore
from cortex.http.request import Request
from cortex.http.routing import Route, in_memory
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response
from cortex.parsing import items as stored_items
from cortex.parsing.items import StoredTexts
from cortex.parsing.parser import BodyParser
from cortex.wire.errors import ConversationNotFound, InvalidValue, ItemNotFound, shorten
from cortex.wire.fields.body import check_content_type, decode

_ALL = "/v1/conversations"
_ONE = f"{_ALL}/{{id}}"
MAX_ITEMS_AT_ONCE = 20
"""As OpenAI's API."""
_MAX_METADATA_BYTES = 128 * 1024
"""Above what 16 pairs take with every character escaped."""
_NO_OUTPUT = '{"output":[]}'

_MetadataKey = Annotated[str, msgspec.Meta(max_length=64)]
_MetadataValue = Annotated[str, msgspec.Meta(max_length=512)]
_Metadata: Any = Annotated[dict[_MetadataKey, _MetadataValue], msgspec.Meta(max_length=16)]


class _Creation(msgspec.Struct, frozen=True):
    items: Raw = Raw(b"null")
    metadata: Raw = Raw(b"null")


class _Addition(msgspec.Struct, frozen=True):
    items: Raw


class _Update(msgspec.Struct, frozen=True):
    metadata: Raw


class _Caller(NamedTuple):
    """A request, and who sent it."""

    request: Request
    owner: Owner
    client: str


class StoredConversations:
    """Serves conversations to the keys that made them."""

    def __init__(
        self, store: ResponseStore, admission: AdmissionController, parser: BodyParser, deferred: DeferredResponses
    ) -> None:
        self._store = store
        self._admission = admission
        self._parser = parser
        self._deferred = deferred

    def routes(self) -> list[HttpRoute]:
        items, item = f"{_ONE}/items", f"{_ONE}/items/{{item_id}}"
        works: list[tuple[str, str, Callable[..., Coroutine[Any, Any, Response]]]] = [
            ("POST", _ALL, self._create),
            ("GET", _ONE, self._show),
            ("POST", _ONE, self._update),
            ("DELETE", _ONE, self._delete),
            ("GET", items, self._list_items),
            ("POST", items, self._add),
            ("GET", item, self._show_item),
            ("DELETE", item, self._delete_item),
        ]
        # Items may have pictures, like the input of a response.
        return [Route(methods, path, partial(self._begin, work), in_memory) for methods, path, work in works]

    def _begin(self, work: Callable[..., Coroutine[Any, Any, Response]], exchange: Exchange, /, **values: str) -> None:
        request = exchange.request
        key = self._admission.meter.key(request)
        if not self._store.section.store:
            raise InvalidValue("This gateway stores no conversations (responses.store): send them in 'input'.")
        if request.method == b"POST":
            check_content_type((request.header(b"content-type") or b"").decode("latin-1"), required=True)
        caller = _Caller(request, self._owner(key.id if key is not None else ""), client_of(key, request))
        self._deferred.respond(exchange, work(caller, **values))

    async def texts(self, key_id: str, id: str) -> StoredTexts:
        """All items of a conversation, as the input of a stored response. Raises ConversationNotFound."""
        found = await self._store.run(lambda execute: tables.items_of(execute, id, self._owner(key_id)))
        if found is None:
            raise _not_found(id)
        return StoredTexts(id, f"[{','.join(found)}]", _NO_OUTPUT)

    def _owner(self, key_id: str) -> Owner:
        return Owner(key_id, self._store.clock(), self._store.section.retention_s)

    async def _create(self, caller: _Caller) -> Response:
        body, owner = caller.request.body, caller.owner
        self._check_size(len(body))
        wanted = decode(body or b"{}", _Creation)
        id, metadata = f"conv_{uuid.uuid4().hex}", _metadata(wanted.metadata)
        items = await self._checked(wanted.items, caller.client)
        await self._store.run(lambda execute: tables.create(execute, id, owner, metadata, items))
        made = ConversationRow(id, int(owner.now_s), metadata, 0)
        return json_response(made.as_json())

    async def _show(self, caller: _Caller, id: str) -> Response:
        found = await self._store.run(lambda execute: tables.read(execute, id, caller.owner))
        return json_response(_existing(found, id).as_json())

    async def _update(self, caller: _Caller, id: str) -> Response:
        metadata = _metadata(decode(caller.request.body, _Update).metadata)
        found = await self._store.run(lambda execute: tables.update(execute, id, caller.owner, metadata))
        return json_response(_existing(found, id).as_json())

    async def _delete(self, caller: _Caller, id: str) -> Response:
        if not await self._store.run(lambda execute: tables.delete(execute, id, caller.owner)):
            raise _not_found(id)
        return json_response({"id": id, "object": "conversation.deleted", "deleted": True})

    async def _list_items(self, caller: _Caller, id: str) -> Response:
        texts = await self.texts(caller.owner.key_id, id)
        return await item_page(self._parser, caller.request, caller.client, [texts])

    async def _add(self, caller: _Caller, id: str) -> Response:
        body, owner = caller.request.body, caller.owner
        self._check_size(len(body))
        items = await self._checked(decode(body, _Addition).items, caller.client)
        found, has_room = await self._store.run(
            lambda execute: (tables.read(execute, id, owner), tables.has_room(execute, id, len(items)))
        )
        self._check_size(_existing(found, id).num_bytes + len(body))
        if not has_room:
            raise InvalidValue(
                f"items: the conversation would have more than {stored_items.MAX_ITEMS} items; start a new one.",
                param="items",
            )
        if not await self._store.run(lambda execute: tables.append(execute, id, owner, items)):
            raise _not_found(id)
        added = [Raw(tables.as_conversation_item(item)[1].encode()) for item in items]
        return json_response(
            stored_items.listing(added, limit=len(added), ascending=True, after=None)  # in the order given
        )

    async def _show_item(self, caller: _Caller, id: str, item_id: str) -> Response:
        item = await self._store.run(lambda execute: tables.item_of(execute, id, caller.owner, item_id))
        if item is None:
            raise _no_item(item_id)
        return json_response(Raw(item.encode()))

    async def _delete_item(self, caller: _Caller, id: str, item_id: str) -> Response:
        if not await self._store.run(lambda execute: tables.delete_item(execute, id, caller.owner, item_id)):
            raise _no_item(item_id)
        return await self._show(caller, id)

    def _check_size(self, num_bytes: int) -> None:
        """Raises InvalidValue for a conversation that is too large."""
        if num_bytes > self._store.max_entry_bytes:
            raise InvalidValue(
                f"items: the conversation would be larger than {self._store.section.max_entry_mb} MB "
                "(responses.max_entry_mb); start a new one.",
                param="items",
            )

    async def _checked(self, given: Raw, client: str) -> Sequence[Raw]:
        """The items, each with an id. Raises InvalidValue for what could not be the input of a response."""
        if bytes(given).strip() == b"null":
            return ()
        if not bytes(given).startswith(b"["):
            raise InvalidValue("items: it must be an array of items.", param="items")
        if stored_items.has_more_than(MAX_ITEMS_AT_ONCE, bytes(given)):
            raise InvalidValue(f"items: add at most {MAX_ITEMS_AT_ONCE} at a time.", param="items")
        if not stored_items.split(given):
            return ()
        try:
            body = msgspec.json.encode({"model": "any", "input": given})
            await self._parser.parse("openai_responses", body, client)
        except InvalidValue as problem:
            param = None if problem.param is None else problem.param.replace("input", "items", 1)
            raise InvalidValue(problem.message.replace("input[", "items[", 1), param=param) from problem
        raw = stored_items.with_ids(stored_items.split(given), new_response_id())
        return msgspec.json.decode(raw, type=list[Raw])


def _metadata(given: Raw) -> str:
    """`metadata` of a request as JSON. Raises InvalidValue."""
    if len(bytes(given)) > _MAX_METADATA_BYTES:
        raise InvalidValue("metadata: it may have 16 pairs, of at most 64 and 512 characters.", param="metadata")
    is_given = bytes(given) != b"null"
    return msgspec.json.encode(decode(bytes(given), _Metadata) if is_given else {}).decode()


def _existing(found: ConversationRow | None, id: str) -> ConversationRow:
    if found is None:
        raise _not_found(id)
    return found


def _not_found(id: str) -> ConversationNotFound:
    return ConversationNotFound(
        f"Conversation with id '{shorten(id)}' not found: it was not made with this key, was deleted, or has expired.",
        param="conversation",
    )


def _no_item(item_id: str) -> ItemNotFound:
    return ItemNotFound(f"Item with id '{shorten(item_id)}' not found in this conversation.", param="item_id")
