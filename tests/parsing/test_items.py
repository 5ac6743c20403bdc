"""Items of stored responses: bounds, and the cost of references."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest
from msgspec import Raw

from cortex.parsing import items
from cortex.parsing.items import StoredTexts
from cortex.wire.errors import InvalidValue, ItemNotFound

STEM = "ab" * 16


def stored(num_items: int) -> StoredTexts:
    output = [{"type": "message", "id": f"msg_{STEM}_{number}"} for number in range(num_items)]
    body = msgspec.json.encode({"id": f"resp_{STEM}", "status": "completed", "output": output}).decode()
    return StoredTexts(f"resp_{STEM}", "[]", body)


def test_decodes_a_stored_response_once_for_all_references_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[StoredTexts] = []
    outputs = items.outputs

    def counted(response: StoredTexts) -> list[Raw]:
        read.append(response)
        return outputs(response)

    monkeypatch.setattr(items, "outputs", counted)
    references = {at: f"msg_{STEM}_{at % 7}" for at in range(100)}
    resolved = items.resolve([Raw(b"{}")] * 100, references, {f"resp_{STEM}": stored(7)})
    assert [msgspec.json.decode(item)["id"] for item in resolved] == list(references.values())
    assert len(read) == 1


def test_rejects_a_reference_whose_item_has_another_id() -> None:
    with pytest.raises(ItemNotFound):
        items.resolve([Raw(b"{}")], {0: f"rs_{STEM}_0"}, {f"resp_{STEM}": stored(1)})


def test_splits_as_many_items_as_are_allowed_and_rejects_one_more() -> None:
    most = b",".join([b'{"a":1,"b":2}'] * items.MAX_ITEMS)
    assert len(items.split(Raw(b"[" + most + b"]"))) == items.MAX_ITEMS
    with pytest.raises(InvalidValue, match="16384 items"):
        items.split(Raw(b"[" + most + b",{}]"))


def test_does_not_decode_what_a_client_puts_in_place_of_a_type() -> None:
    item = Raw(b'{"x":"item_reference","type":[' + b",".join([b"[]"] * 100_000) + b"]}")
    tracemalloc.start()
    try:
        assert items.references([item]) == {}
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
