"""The tables of stored responses, and the statements on them, which SQLite and PostgreSQL both run.

`response` has one row for each response, with the input of its own request and the response object, both as JSON.
`background_run` has when a background response was last renewed by its gateway. Every function runs inside the caller's
transaction. A row is visible only to the key that made it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from msgspec import Raw

from cortex.gateway.database import Execute, Schema
from cortex.gateway.responses import conversation_tables
from cortex.gateway.responses.conversation_tables import BoundedTable
from cortex.parsing import items
from cortex.parsing.items import StoredTexts

UNFINISHED = ("queued", "in_progress")
ADDED = ("completed", "incomplete")
"""Responses that are added to their conversation."""

SCHEMA: Schema = (
    """CREATE TABLE IF NOT EXISTS response (
        id TEXT PRIMARY KEY,
        key_id TEXT NOT NULL,
        previous_id TEXT,
        status TEXT NOT NULL,
        created_s BIGINT NOT NULL,
        expires_s BIGINT NOT NULL,
        num_bytes BIGINT NOT NULL,
        input TEXT NOT NULL,
        body TEXT NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS response_expiry ON response (expires_s)",
    "CREATE INDEX IF NOT EXISTS response_size ON response (key_id, created_s, num_bytes)",
    """CREATE TABLE IF NOT EXISTS background_run (
        id TEXT PRIMARY KEY,
        renewed_s BIGINT NOT NULL
    )""",
    *conversation_tables.TABLES,
)
_COLUMNS = "response.id, response.previous_id, status, renewed_s, input, body"
_ADD = """
    INSERT INTO response (id, key_id, previous_id, status, created_s, expires_s, num_bytes, input, body)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) ON CONFLICT (id) DO NOTHING
"""
_FINISH = """
    UPDATE response SET status = $1, body = $2, num_bytes = num_bytes + $3
    WHERE id = $4 AND key_id = $5 AND status IN ('queued', 'in_progress') RETURNING input
"""
_READ = f"""
    SELECT {_COLUMNS} FROM response LEFT JOIN background_run ON background_run.id = response.id
    WHERE response.id = $1 AND key_id = $2 AND expires_s > $3
"""
_CHAIN = """
    WITH RECURSIVE chain (id, previous_id, depth) AS (
        SELECT id, previous_id, 0 FROM response WHERE id = $1 AND key_id = $2 AND expires_s > $3
        UNION ALL
        SELECT response.id, response.previous_id, depth + 1 FROM response JOIN chain ON response.id = chain.previous_id
        WHERE key_id = $2 AND expires_s > $3
    )
"""
_READ_CHAIN = f"""
    {_CHAIN} SELECT {_COLUMNS} FROM chain JOIN response ON response.id = chain.id
    LEFT JOIN background_run ON background_run.id = response.id ORDER BY depth DESC
"""
_EXTEND_CHAIN = f"""
    {_CHAIN} UPDATE response SET expires_s = $4 WHERE expires_s < $5 AND id IN (SELECT id FROM chain)
"""
_DELETE = "DELETE FROM response WHERE id = $1 AND key_id = $2 AND expires_s > $3 RETURNING id"
_ADD_RUN = "INSERT INTO background_run (id, renewed_s) VALUES ($1, $2) ON CONFLICT (id) DO NOTHING"
_RENEW_RUN = "UPDATE background_run SET renewed_s = $1 WHERE id = $2 RETURNING id"
_END_RUN = "DELETE FROM background_run WHERE id = $1"
_DROP = "DELETE FROM response WHERE id = $1"
_TABLE = BoundedTable("response", age="created_s")

_EXTEND_SHARE = 0.1
"""A chain's expiry is extended only by at least this fraction of the retention, so that long chains are not rewritten
for every response."""


class NewResponse(NamedTuple):
    """A response to store."""

    id: str
    key_id: str
    """The id of the client's key; empty on an open gateway."""
    previous_id: str | None
    status: str
    input: bytes
    """The input items of its request, a JSON array."""
    body: bytes
    """The response object."""
    conversation_id: str | None = None
    """The conversation to which its items are added once it has ended."""
    is_retrievable: bool = True
    """If False, it is only added to its conversation."""

    @property
    def items(self) -> list[Raw]:
        """The items that it adds to its conversation."""
        texts = StoredTexts(self.id, self.input, self.body)
        return [*items.inputs(texts), *items.outputs(texts)]


class StoredResponse(NamedTuple):
    """A response as it was stored."""

    id: str
    previous_id: str | None
    status: str
    renewed_s: int | None
    """When its background run was last renewed; None without a run."""
    input: str
    body: str

    @property
    def is_finished(self) -> bool:
        return self.status not in UNFINISHED

    @property
    def texts(self) -> StoredTexts:
        return StoredTexts(self.id, self.input, self.body)


def add(execute: Execute, response: NewResponse, now_s: float, retention_s: float) -> None:
    """Store `response`, and keep the responses that it continues at least as long."""
    expires_s = int(now_s + retention_s)
    num_bytes = len(response.input) + len(response.body)
    id, key_id, previous_id, status, input, body, conversation_id, is_retrievable = response
    if conversation_id is not None:
        if status in ADDED:
            owner = conversation_tables.Owner(key_id, now_s, retention_s)
            conversation_tables.append(execute, conversation_id, owner, response.items)
        elif status in UNFINISHED:
            conversation_tables.link(execute, id, conversation_id)
    if not is_retrievable:
        return
    execute(
        _ADD,
        (id, key_id, previous_id, status, int(now_s), expires_s, num_bytes, input.decode(), body.decode()),
    )
    if status in UNFINISHED:
        execute(_ADD_RUN, (id, int(now_s)))
    if previous_id is not None:
        due_s = int(expires_s - _EXTEND_SHARE * retention_s)
        execute(_EXTEND_CHAIN, (previous_id, key_id, int(now_s), expires_s, due_s))


def finish(execute: Execute, id: str, key_id: str, status: str, body: bytes, now_s: float, retention_s: float) -> bool:
    """Write the end of a background response; False if it has ended already, or was deleted."""
    found = execute(_FINISH, (status, body.decode(), len(body), id, key_id))
    conversation_id = _end_run(execute, id)
    if found and conversation_id is not None and status in ADDED:
        response = NewResponse(id, key_id, None, status, str(found[0][0]).encode(), body)
        owner = conversation_tables.Owner(key_id, now_s, retention_s)
        conversation_tables.append(execute, conversation_id, owner, response.items)
    return bool(found)


def read(execute: Execute, key_id: str, id: str, now_s: float) -> StoredResponse | None:
    """The response with this id, if it belongs to the key."""
    rows = execute(_READ, (id, key_id, int(now_s)))
    return _stored(rows[0]) if rows else None


def read_chain(execute: Execute, key_id: str, id: str, now_s: float) -> list[StoredResponse]:
    """The response with this id and the stored ones that it continues, oldest first."""
    return [_stored(row) for row in execute(_READ_CHAIN, (id, key_id, int(now_s)))]


def delete(execute: Execute, key_id: str, id: str, now_s: float) -> bool:
    """Delete a response; False if there is none with this id. A gateway that runs it notices at the next renewal."""
    found = execute(_DELETE, (id, key_id, int(now_s)))
    if found:
        _end_run(execute, id)
    return bool(found)


def renew(execute: Execute, ids: Iterable[str], now_s: float) -> set[str]:
    """Show that the background responses `ids` still run; returns those that were cancelled or deleted meanwhile."""
    return {id for id in ids if not execute(_RENEW_RUN, (int(now_s), id))}


def total_bytes(execute: Execute) -> int:
    return _TABLE.total_bytes(execute)


def purge(execute: Execute, now_s: float, max_bytes: int) -> int:
    """Delete some of what has expired, or else some of what exceeds `max_bytes`; returns how many were deleted.

    Beyond the size limit, the oldest responses of the key with the most bytes are deleted.
    """
    doomed = _TABLE.rows_to_delete(execute, now_s, max_bytes)
    for id in doomed:
        execute(_DROP, (id,))
        _end_run(execute, id)
    return len(doomed)


def _end_run(execute: Execute, id: str) -> str | None:
    """Forget that a response runs; returns the conversation that it belongs to."""
    execute(_END_RUN, (id,))
    return conversation_tables.unlink(execute, id)


def _stored(row: Sequence[Any]) -> StoredResponse:
    id, previous_id, status, renewed_s, input, body = row
    return StoredResponse(id, previous_id, status, None if renewed_s is None else int(renewed_s), input, body)
