"""The body of `GET /v1/models`, with the pages that Anthropic's clients ask for. OpenAI's clients get one page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cortex.wire.errors import InvalidValue, shorten

MAX_PER_PAGE = 1000


def model_list(entries: Sequence[dict[str, Any]], query: Callable[[str], str | None]) -> dict[str, Any]:
    """The entries after `after_id` or before `before_id`, at most `limit` of them. Raises InvalidValue."""
    start, end = 0, len(entries)
    after, before, limit = query("after_id"), query("before_id"), query("limit")
    if after is not None:
        start = _index(entries, "after_id", after) + 1
    if before is not None:
        end = _index(entries, "before_id", before)
    num_found = max(0, end - start)
    num_listed = num_found if limit is None else min(num_found, _limit(limit))
    if before is not None and after is None:
        start = end - num_listed
    page = entries[start : start + num_listed]
    return {
        "object": "list",
        "data": page,
        "has_more": num_listed < num_found,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def _index(entries: Sequence[dict[str, Any]], name: str, id: str) -> int:
    for index, entry in enumerate(entries):
        if entry["id"] == id:
            return index
    raise InvalidValue(f"Invalid value for '{name}': there is no model `{shorten(id)}` in the list.", param=name)


def _limit(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= MAX_PER_PAGE:
        return int(text)
    raise InvalidValue(f"Invalid value for 'limit': use a number from 1 to {MAX_PER_PAGE}.", param="limit")
