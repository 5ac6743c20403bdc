"""`/session/conversations`: the conversations of people who signed in to the page, if the operator allows it.

Each belongs to one key or user, and only they can read it. They are kept in the database of the ledger.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cortex.gateway.database import Database, Execute, Schema
from cortex.gateway.ledger.keys import KeySection
from cortex.gateway.proxy.routes import json_response
from cortex.http.request import Request
from cortex.http.server.server import Response
from cortex.wire.errors import InvalidValue, RouteNotFound

MAX_KEPT = 60
"""Conversations per person, as many as the page shows. Older ones are deleted."""
_MAX_ID = 100

SCHEMA: Schema = (
    """CREATE TABLE IF NOT EXISTS page_conversation (
        owner TEXT NOT NULL,
        id TEXT NOT NULL,
        changed_ms BIGINT NOT NULL,
        content TEXT NOT NULL,
        PRIMARY KEY (owner, id)
    )""",
)
_LIST = "SELECT content FROM page_conversation WHERE owner = $1 ORDER BY changed_ms DESC, id"
_PUT = """
    INSERT INTO page_conversation (owner, id, changed_ms, content) VALUES ($1, $2, $3, $4)
    ON CONFLICT (owner, id) DO UPDATE SET changed_ms = excluded.changed_ms, content = excluded.content
"""
_TRIM = """
    DELETE FROM page_conversation WHERE owner = $1 AND id NOT IN
        (SELECT id FROM page_conversation WHERE owner = $1 ORDER BY changed_ms DESC, id LIMIT $2)
"""
_DELETE = "DELETE FROM page_conversation WHERE owner = $1 AND id = $2 RETURNING id"


class _Conversation(msgspec.Struct, frozen=True):
    """The fields of a conversation that are read here; the page knows the rest."""

    id: str
    changed: int
    turns: list[Any]


class Conversations:
    """Used on the loop's thread. Requests raise `DatabaseUnavailable`, InvalidValue and RouteNotFound."""

    def __init__(self, database: Database) -> None:
        self._database = database.use(SCHEMA)

    async def show(self, _: Request, key: KeySection) -> Response:
        rows = await self._database.serve(lambda execute: execute(_LIST, (key.id,)))
        return json_response({"conversations": [msgspec.Raw(str(row[0]).encode()) for row in rows]})

    async def delete(self, _: Request, key: KeySection, name: str) -> Response:
        if not await self._database.serve(lambda execute: execute(_DELETE, (key.id, name))):
            raise RouteNotFound("There is no such conversation.")
        return json_response({"deleted": name})

    async def put(self, request: Request, key: KeySection, name: str) -> Response:
        body = request.body
        try:
            found = msgspec.json.decode(body, type=_Conversation)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
            raise InvalidValue(f"The body is not a conversation: {problem}") from problem
        if found.id != name or len(name) > _MAX_ID:
            raise InvalidValue("The id in the body is not the one in the path.", param="id")

        def work(execute: Execute) -> None:
            execute(_PUT, (key.id, name, min(max(found.changed, 0), 2**53), body.decode()))
            execute(_TRIM, (key.id, MAX_KEPT))

        await self._database.serve(work)
        return json_response({"stored": name})
