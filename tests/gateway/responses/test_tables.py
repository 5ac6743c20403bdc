from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cortex.gateway.database import Database
from cortex.gateway.responses import tables
from cortex.gateway.responses.tables import NewResponse

RETENTION_S = 1000.0

Call = Callable[..., Any]


@pytest.fixture
def call(database: str) -> Iterator[Call]:
    """Calls a function of the tables in a transaction of its own."""
    opened = Database(database).use(tables.SCHEMA)
    yield lambda function, *values: opened.run(lambda execute: function(execute, *values))
    opened.close_connection()


def response(id: str, previous_id: str | None = None, *, key: str = "k", status: str = "completed") -> NewResponse:
    return NewResponse(id, key, previous_id, status, b'["\\u0000 \xc3\xa4"]', b'{"output":[]}')


def test_reads_a_chain_oldest_first_within_its_key(call: Call) -> None:
    for id, previous in (("a", None), ("b", "a"), ("c", "b")):
        call(tables.add, response(id, previous), 10, RETENTION_S)
    assert [stored.id for stored in call(tables.read_chain, "k", "c", 10)] == ["a", "b", "c"]
    assert call(tables.read_chain, "other", "c", 10) == []
    assert call(tables.read, "k", "a", 10).input == '["\\u0000 ä"]'
    assert call(tables.delete, "other", "b", 10) is False
    assert call(tables.delete, "k", "b", 10) is True
    assert [(stored.id, stored.previous_id) for stored in call(tables.read_chain, "k", "c", 10)] == [("c", "b")]


def test_a_response_expires_unless_it_is_continued(call: Call) -> None:
    call(tables.add, response("a"), 0, RETENTION_S)
    call(tables.add, response("b"), 0, RETENTION_S)
    call(tables.add, response("c", "b"), 500, RETENTION_S)
    assert call(tables.read, "k", "a", 1100) is None
    assert call(tables.read, "k", "b", 1100) is not None
    assert call(tables.purge, 1100, 10**9) == 1
    assert call(tables.purge, 1100, 10**9) == 0
    assert call(tables.purge, 1500, 10**9) == 2


def test_deletes_the_oldest_of_the_largest_key_beyond_the_total_size(call: Call) -> None:
    call(tables.add, response("mine", key="small"), 0, RETENTION_S)
    for number in range(5):
        call(tables.add, response(f"r{number}", key="large"), 1 + number, RETENTION_S)
    size = len(response("x").input) + len(response("x").body)
    while call(tables.purge, 10, 3 * size):
        pass
    left = {
        id
        for id in ("mine", *(f"r{number}" for number in range(5)))
        if call(tables.read, "small" if id == "mine" else "large", id, 10)
    }
    assert left == {"mine", "r3", "r4"}


def test_a_background_response_ends_once(call: Call) -> None:
    call(tables.add, response("a", status="queued"), 7, RETENTION_S)
    assert call(tables.read, "k", "a", 8).renewed_s == 7
    assert call(tables.renew, ["a", "gone"], 9) == {"gone"}
    assert call(tables.read, "k", "a", 9).renewed_s == 9
    assert call(tables.finish, "a", "other", "cancelled", b"{}", 9, 9) is False
    assert call(tables.read, "k", "a", 9).is_finished is False
    assert call(tables.finish, "a", "k", "cancelled", b'{"x":1}', 9, 9) is True
    assert call(tables.finish, "a", "k", "completed", b"{}", 9, 9) is False
    stored = call(tables.read, "k", "a", 9)
    assert (stored.status, stored.body, stored.renewed_s) == ("cancelled", '{"x":1}', None)
    assert call(tables.renew, ["a"], 10) == {"a"}


def test_link_of_a_background_response_goes_with_it(call: Call) -> None:
    for id in ("deleted", "expired", "ended"):
        call(tables.add, response(id, status="queued")._replace(conversation_id="conv_1"), 0, RETENTION_S)
    assert call(tables.delete, "k", "deleted", 1)
    assert call(tables.finish, "ended", "k", "failed", b"{}", 1, RETENTION_S)
    assert call(tables.purge, RETENTION_S + 1, 10**9) == 2
    assert call(lambda execute: execute("SELECT response_id FROM conversation_response", ())) == []
