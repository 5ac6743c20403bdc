from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cortex.parsing.envelope import read
from cortex.wire.dialects import anthropic_messages, openai_chat, openai_responses
from cortex.wire.errors import InvalidValue
from cortex.wire.events import Finish, Start, TextDelta, Usage
from cortex.wire.fields.request_class import CLASSES, RequestClass, anthropic_tier_of, served_class, tier_of
from cortex.wire.requests import GenerateRequest


def chat(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"service_tier": "auto"}, None),
        ({"service_tier": None}, None),
        ({"service_tier": "default"}, "default"),
        ({"service_tier": "flex"}, "flex"),
        ({"service_tier": "priority"}, "priority"),
        ({"service_tier": "fast"}, "priority"),
        ({"priority": 0}, None),
        ({"priority": -3}, "priority"),
        ({"priority": 7}, "flex"),
        ({"priority": -3, "service_tier": "flex"}, "flex"),
        ({"priority": 7, "service_tier": "priority"}, "flex"),
    ],
)
def test_gateway_and_node_read_the_same_class(fields: dict[str, Any], expected: RequestClass | None) -> None:
    assert read(chat(**fields), "openai_chat").summary.asked_class == expected
    assert openai_chat.parse(chat(**fields)).request_class == expected


@pytest.mark.parametrize("fields", [{"service_tier": "fastest"}, {"service_tier": 1}, {"priority": "high"}])
def test_unknown_class_is_an_error_that_names_the_field(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue) as caught:
        read(chat(**fields), "openai_chat")
    assert caught.value.param == next(iter(fields))


@pytest.mark.parametrize(
    ("asked", "default", "highest", "expected"),
    [
        (None, None, None, "default"),
        (None, "flex", None, "flex"),
        ("priority", "flex", None, "priority"),
        ("priority", None, "default", "default"),
        (None, "priority", "flex", "flex"),
        ("flex", None, "idle", "idle"),
    ],
)
def test_key_has_a_default_and_a_bound(
    asked: RequestClass | None, default: RequestClass | None, highest: RequestClass | None, expected: RequestClass
) -> None:
    assert served_class(asked, default, highest) == expected


def test_response_says_in_which_tier_it_was_served() -> None:
    request = msgspec.structs.replace(openai_chat.parse(chat(service_tier="priority")), request_class="default")
    assert folded(openai_chat, request)["service_tier"] == "default"
    assert b'"service_tier":"default"' in openai_chat.Encoder(request, id="i", created=1, model="m").encode(START)
    assert "service_tier" not in folded(openai_chat, openai_chat.parse(chat()))
    responses = openai_responses.parse(b'{"model": "m", "input": "hi", "service_tier": "flex"}')
    assert folded(openai_responses, responses)["service_tier"] == "flex"
    assert folded(openai_responses, openai_responses.parse(b'{"model": "m", "input": "hi"}'))["service_tier"] is None
    messages = anthropic_messages.parse(chat(max_tokens=9, service_tier="standard_only"))
    assert folded(anthropic_messages, messages)["usage"]["service_tier"] == "standard"
    assert [tier_of(name) for name in CLASSES] == ["flex", "flex", "default", "priority"]
    assert [anthropic_tier_of(name) for name in CLASSES] == ["batch", "batch", "standard", "priority"]


START = Start(id="i", model="m", created=1)


def folded(dialect: Any, request: GenerateRequest) -> dict[str, Any]:
    events = [START, TextDelta(text="a"), Finish(reason="stop", usage=Usage(prompt_tokens=1, completion_tokens=1))]
    body: dict[str, Any] = msgspec.json.decode(dialect.fold(events, request, id="i", created=1, model="m"))
    return body
