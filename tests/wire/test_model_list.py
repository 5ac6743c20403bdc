"""Pages of the list of models."""

from __future__ import annotations

from typing import Any

import pytest

from cortex.wire.errors import InvalidValue
from cortex.wire.model_list import model_list
from cortex.wire.model_names import plain_name, split_quant

ENTRIES = [{"id": id} for id in "abcde"]


@pytest.mark.parametrize(
    ("name", "plain", "split"),
    [
        ("qwen3", "qwen3", ("qwen3", None)),
        ("qwen3:4b", "qwen3:4b", ("qwen3:4b", None)),
        ("qwen3:latest", "qwen3", ("qwen3", None)),
        ("hf.co/a/b:Q4_K_M", "a/b:Q4_K_M", ("a/b", "Q4_K_M")),
        ("a/b:", "a/b:", ("a/b:", None)),
        ("a:b/c", "a:b/c", ("a:b/c", None)),
    ],
)
def test_names_in_the_spelling_of_ollama(name: str, plain: str, split: tuple[str, str | None]) -> None:
    assert plain_name(name) == plain
    assert split_quant(plain) == split


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
