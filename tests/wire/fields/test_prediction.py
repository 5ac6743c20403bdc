from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from cortex.wire.dialects.anthropic_messages import request as messages
from cortex.wire.dialects.ollama import chat as ollama_chat
from cortex.wire.dialects.openai_chat import request as chat
from cortex.wire.dialects.openai_responses import request as responses
from cortex.wire.errors import InvalidValue


def predicted(prediction: Any) -> str | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "prediction": prediction}
    return chat.parse(json.dumps(body).encode()).prediction


@pytest.mark.parametrize(
    ("prediction", "text"),
    [
        (None, None),
        ({"type": "content", "content": "a text"}, "a text"),
        ({"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": " text"}]}, "a text"),
        ({"type": "content", "content": []}, ""),
        ({"type": "content", "content": ""}, ""),
    ],
)
def test_prediction_is_a_text_or_parts_of_one(prediction: Any, text: str | None) -> None:
    assert predicted(prediction) == text


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("text", "prediction"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "other", "content": "x"}, "prediction.type"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0].type"),
    ],
)
def test_rejects_what_is_no_text(prediction: Any, param: str) -> None:
    with pytest.raises(InvalidValue) as raised:
        predicted(prediction)
    assert raised.value.param == param


def test_responses_take_it_too() -> None:
    body = {"model": "m", "input": "x", "prediction": {"type": "content", "content": "y"}}
    assert responses.parse(json.dumps(body).encode()).prediction == "y"


@pytest.mark.parametrize(("given", "expected"), [("off", "off"), (None, None)])
def test_speculation_can_be_switched_off(given: str | None, expected: str | None) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "speculation": given}
    assert chat.parse(json.dumps(body).encode()).sampling.speculation == expected


@pytest.mark.parametrize(
    ("parse", "switch"),
    [
        (messages.parse, {"speculation": "off"}),
        (ollama_chat.parse, {"options": {"speculation": "off"}}),
        (responses.parse, {"speculation": "off", "input": "x"}),
    ],
)
def test_every_dialect_can_switch_it_off(parse: Callable[[bytes], Any], switch: dict[str, Any]) -> None:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]} | switch
    assert parse(json.dumps(body).encode()).sampling.speculation == "off"


def test_speculation_cannot_be_chosen_by_a_request() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "speculation": "lookup"}
    with pytest.raises(InvalidValue, match="off"):
        chat.parse(json.dumps(body).encode())
