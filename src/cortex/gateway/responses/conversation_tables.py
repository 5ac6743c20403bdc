"""The tables of conversations, and the statements on them, which SQLite and PostgreSQL both run.

`conversation` has one row for each, `conversation_item` its items in order, each as JSON with an id.
`conversation_response` has the conversation that a background response is added to when it has ended. Every function
runs inside the caller's transaction. A conversation is visible only to the key that made it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from cortex.gateway.database import Execute
from cortex.parsing import items as stored_items

_BATCH = 200
"""Rows that a purge deletes at once."""


class BoundedTable:
    """A table with the columns `id`, `key_id`, `expires_s` and `num_bytes`. Read-only, because rows elsewhere may have
    to be deleted too. Every method runs inside the caller's transaction."""

    def __init__(self, name: str, *, age: str) -> None:
        """`age`: the column by which rows are deleted, smallest first."""
        self._expired = f"SELECT id FROM {name} WHERE expires_s <= $1 LIMIT $2"
        self._total = f"SELECT COALESCE(SUM(num_bytes), 0) FROM {name}"
        self._largest_key = f"SELECT key_id FROM {name} GROUP BY key_id ORDER BY SUM(num_bytes) DESC, key_id LIMIT 1"
        self._oldest = f"SELECT id, num_bytes FROM {name} WHERE key_id = $1 ORDER BY {age}, id LIMIT $2"

    def total_bytes(self, execute: Execute) -> int:
        return int(execute(self._total, ())[0][0])

    def rows_to_delete(self, execute: Execute, now_s: float, max_bytes: int) -> list[str]:
        """The ids of some rows that have expired, or else of some that exceed `max_bytes`: the oldest of the key with
        the most bytes."""
        ids = [str(row[0]) for row in execute(self._expired, (int(now_s), _BATCH))]
        if ids or (excess := self.total_bytes(execute) - max_bytes) <= 0:
            return ids
        (largest,) = execute(self._largest_key, ())[0]
        for id, num_bytes in execute(self._oldest, (largest, _BATCH)):
            ids.append(str(id))
            excess -= int(num_bytes)
            if excess <= 0:
                break
        return ids


TABLES = (
    """CREATE TABLE IF NOT EXISTS conversation (
        id TEXT PRIMARY KEY,
        key_id TEXT NOT NULL,
        created_s BIGINT NOT NULL,
        expires_s BIGINT NOT NULL,
        num_bytes BIGINT NOT NULL,
        metadata TEXT NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS conversation_expiry ON conversation (expires_s)",
    """CREATE TABLE IF NOT EXISTS conversation_item (
        conversation_id TEXT NOT NULL,
        position BIGINT NOT NULL,
        item_id TEXT NOT NULL,
        item TEXT NOT NULL,
        PRIMARY KEY (conversation_id, position)
    )""",
    """CREATE TABLE IF NOT EXISTS conversation_response (
        response_id TEXT PRIMARY KEY,
        conversation_id TEXT NOT NULL
    )""",
)
_ADD = "INSERT INTO conversation (id, key_id, created_s, expires_s, num_bytes, metadata) VALUES ($1, $2, $3, $4, 0, $5)"
_READ = "SELECT id, created_s, metadata, num_bytes FROM conversation WHERE id = $1 AND key_id = $2 AND expires_s > $3"
_UPDATE = "UPDATE conversation SET metadata = $1 WHERE id = $2 AND key_id = $3 AND expires_s > $4 RETURNING id"
_DELETE = "DELETE FROM conversation WHERE id = $1 AND key_id = $2 AND expires_s > $3 RETURNING id"
_GROW = "UPDATE conversation SET num_bytes = num_bytes + $1, expires_s = $2 WHERE id = $3 AND key_id = $4 RETURNING id"
_ITEMS = "SELECT item FROM conversation_item WHERE conversation_id = $1 ORDER BY position"
_NUM_ITEMS = "SELECT COUNT(*), COALESCE(MAX(position), -1) FROM conversation_item WHERE conversation_id = $1"
_ADD_ITEM = "INSERT INTO conversation_item (conversation_id, position, item_id, item) VALUES ($1, $2, $3, $4)"
_ITEM = "SELECT item FROM conversation_item WHERE conversation_id = $1 AND item_id = $2 ORDER BY position LIMIT 1"
_DELETE_ITEM = "DELETE FROM conversation_item WHERE conversation_id = $1 AND item_id = $2 RETURNING item"
_DELETE_ITEMS = "DELETE FROM conversation_item WHERE conversation_id = $1"
_LINK = "INSERT INTO conversation_response (response_id, conversation_id) VALUES ($1, $2)"
_UNLINK = "DELETE FROM conversation_response WHERE response_id = $1 RETURNING conversation_id"
_DROP = "DELETE FROM conversation WHERE id = $1"
_TABLE = BoundedTable("conversation", age="expires_s")

MIN_BYTES = 512
"""Counted bytes of an empty conversation, so that their number is bounded too."""
_WITH_STATUS = (b'"message"', b'"function_call"', b'"function_call_output"')

_fields = msgspec.json.Decoder(dict[str, Raw])
_text = msgspec.json.Decoder(str)


class ConversationRow(NamedTuple):
    """A conversation without its items."""

    id: str
    created_s: int
    metadata: str
    """A JSON object."""
    num_bytes: int

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created_s,
            "metadata": Raw(self.metadata.encode()),
        }


class Owner(NamedTuple):
    """The owner of a conversation, and the time of its use."""

    key_id: str
    now_s: float
    retention_s: float

    @property
    def expires_s(self) -> int:
        return int(self.now_s + self.retention_s)


def create(execute: Execute, id: str, owner: Owner, metadata: str, items: Sequence[Raw]) -> None:
    execute(_ADD, (id, owner.key_id, int(owner.now_s), owner.expires_s, metadata))
    append(execute, id, owner, items, extra_bytes=MIN_BYTES + len(metadata.encode()))


def read(execute: Execute, id: str, owner: Owner) -> ConversationRow | None:
    rows = execute(_READ, (id, owner.key_id, int(owner.now_s)))
    return ConversationRow(*rows[0]) if rows else None


def update(execute: Execute, id: str, owner: Owner, metadata: str) -> ConversationRow | None:
    execute(_UPDATE, (metadata, id, owner.key_id, int(owner.now_s)))
    return read(execute, id, owner)


def delete(execute: Execute, id: str, owner: Owner) -> bool:
    """False if there is none."""
    if not execute(_DELETE, (id, owner.key_id, int(owner.now_s))):
        return False
    execute(_DELETE_ITEMS, (id,))
    return True


def items_of(execute: Execute, id: str, owner: Owner) -> list[str] | None:
    """All items in order, as JSON; None if there is no such conversation."""
    if read(execute, id, owner) is None:
        return None
    return [str(row[0]) for row in execute(_ITEMS, (id,))]


def item_of(execute: Execute, id: str, owner: Owner, item_id: str) -> str | None:
    if read(execute, id, owner) is None:
        return None
    rows = execute(_ITEM, (id, item_id))
    return str(rows[0][0]) if rows else None


def append(execute: Execute, id: str, owner: Owner, items: Sequence[Raw], *, extra_bytes: int = 0) -> bool:
    """Add items at the end, each of which must have an id, and keep the conversation for longer; False if there is
    none. Beyond `MAX_ITEMS` of the parser, further items are not added."""
    if not _grow(execute, id, owner, extra_bytes):  # it locks the row, so that no other gateway has the same positions
        return False
    ((count, last),) = execute(_NUM_ITEMS, (id,))
    shown = [as_conversation_item(item) for item in items[: max(0, stored_items.MAX_ITEMS - int(count))]]
    for position, (item_id, item) in enumerate(shown, start=int(last) + 1):
        execute(_ADD_ITEM, (id, position, item_id, item))
    return _grow(execute, id, owner, sum(len(item.encode()) for _, item in shown))


def has_room(execute: Execute, id: str, num_items: int) -> bool:
    """Whether `num_items` can be added."""
    return int(execute(_NUM_ITEMS, (id,))[0][0]) + num_items <= stored_items.MAX_ITEMS


def _grow(execute: Execute, id: str, owner: Owner, num_bytes: int) -> bool:
    """Count bytes and keep the conversation for longer; False if there is none."""
    return bool(execute(_GROW, (num_bytes, owner.expires_s, id, owner.key_id)))


def delete_item(execute: Execute, id: str, owner: Owner, item_id: str) -> bool:
    """False if there is none."""
    if read(execute, id, owner) is None or not _grow(execute, id, owner, 0):  # the lock first, as everywhere
        return False
    deleted = execute(_DELETE_ITEM, (id, item_id))
    _grow(execute, id, owner, -sum(len(row[0].encode()) for row in deleted))
    return bool(deleted)


def link(execute: Execute, response_id: str, conversation_id: str) -> None:
    """Remember that a response belongs to the conversation once it has ended."""
    execute(_LINK, (response_id, conversation_id))


def unlink(execute: Execute, response_id: str) -> str | None:
    """Forget it; returns the conversation."""
    rows = execute(_UNLINK, (response_id,))
    return str(rows[0][0]) if rows else None


def total_bytes(execute: Execute) -> int:
    return _TABLE.total_bytes(execute)


def purge(execute: Execute, now_s: float, max_bytes: int) -> int:
    """Delete some of what has expired, or else some of what exceeds `max_bytes`, of the key with the most bytes, those
    that were used least recently; returns how many were deleted."""
    doomed = _TABLE.rows_to_delete(execute, now_s, max_bytes)
    for id in doomed:
        execute(_DROP, (id,))
        execute(_DELETE_ITEMS, (id,))
    return len(doomed)


def as_conversation_item(item: Raw) -> tuple[str, str]:
    """The id of an item, and the item as it is listed: with a status, and a message with a list as its content."""
    fields = _fields.decode(item)
    item_id = _text.decode(fields["id"]).replace("\0", "\ufffd")  # which PostgreSQL cannot store in text
    kind = bytes(fields.setdefault("type", Raw(b'"message"')))
    if kind in _WITH_STATUS:
        fields.setdefault("status", Raw(b'"completed"'))
    if kind == b'"message"':
        content = bytes(fields.get("content", b"[]"))
        if re.match(rb'\s*"', content):
            is_output = bytes(fields.get("role", b"")) == b'"assistant"'
            begin = b'[{"type":"output_text","annotations":[],"logprobs":[]' if is_output else b'[{"type":"input_text"'
            fields["content"] = Raw(begin + b',"text":' + content + b"}]")
    return item_id, msgspec.json.encode(fields).decode()
