"""Pages of the list of models."""

from __future__ import annotations

from typing import Any

import pytest

from cortex.wire.errors import InvalidValue
from cortex.wire.model_list import model_list

ENTRIES = [{"id": id} for id in "abcde"]


@pytest.mark.parametrize(
    ("query", "ids", "has_more"),
    [
        ({}, "abcde", False),
        ({"limit": "2"}, "ab", True),
        ({"limit": "5"}, "abcde", False),
        ({"limit": "2", "after_id": "b"}, "cd", True),
        ({"limit": "2", "after_id": "d"}, "e", False),
        ({"after_id": "e"}, "", False),
        ({"limit": "2", "before_id": "d"}, "bc", True),
        ({"limit": "2", "before_id": "b"}, "a", False),
        ({"before_id": "a"}, "", False),
        ({"limit": "1", "after_id": "a", "before_id": "d"}, "b", True),
        ({"after_id": "d", "before_id": "b"}, "", False),
    ],
)
def test_page_has_what_the_query_asks_for(query: dict[str, str], ids: str, has_more: bool) -> None:
    page = model_list(ENTRIES, query.get)
    assert "".join(entry["id"] for entry in page["data"]) == ids
    assert page["has_more"] is has_more
    assert (page["first_id"], page["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))


@pytest.mark.parametrize(
    "query", [{"limit": "0"}, {"limit": "-1"}, {"limit": "x"}, {"limit": "1001"}, {"after_id": "z"}, {"before_id": "z"}]
)
def test_wrong_value_is_named(query: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue) as caught:
        model_list(ENTRIES, query.get)
    assert caught.value.param == next(iter(query))
