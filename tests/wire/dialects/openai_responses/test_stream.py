"""Reasoning in responses: as content, or as a summary where the client asks for one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cortex.wire.dialects.openai_responses import parse
from cortex.wire.dialects.openai_responses.stream import Encoder, fold
from cortex.wire.errors import InvalidValue
from cortex.wire.events import AnyEvent, Finish, ReasoningDelta, Start, TextDelta, Usage
from cortex.wire.requests import GenerateRequest

EVENTS: list[AnyEvent] = [
    Start(id="id", model="m", created=1, prompt_tokens=2, cached_tokens=0),
    ReasoningDelta(text="Let me "),
    ReasoningDelta(text="look."),
    TextDelta(text="Four."),
    Finish(reason="stop", usage=Usage(prompt_tokens=2, completion_tokens=3)),
]


def request(**reasoning: Any) -> GenerateRequest:
    return parse(msgspec.json.encode({"model": "m", "input": "2+2", "reasoning": reasoning}))


def streamed(asked: GenerateRequest) -> list[dict[str, Any]]:
    encoder = Encoder(asked, id="resp_1", created=1, model="m")
    frames = b"".join(encoder.encode(event) for event in EVENTS).decode()
    return [msgspec.json.decode(line[6:]) for line in frames.splitlines() if line.startswith("data: ")]


def whole(asked: GenerateRequest) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.json.decode(fold(EVENTS, asked, id="resp_1", created=1, model="m"))
    return body


@pytest.mark.parametrize("field", ["summary", "generate_summary"])
@pytest.mark.parametrize("style", ["auto", "concise", "detailed"])
def test_a_summary_that_is_asked_for_is_the_reasoning(field: str, style: str) -> None:
    asked = request(**{field: style})
    events = [event for event in streamed(asked) if event.get("item_id") == "rs_1_0"]
    shape = [(event["type"].removeprefix("response.reasoning_summary_"), event["summary_index"]) for event in events]
    assert shape == [("part.added", 0), ("text.delta", 0), ("text.delta", 0), ("text.done", 0), ("part.done", 0)]
    assert events[0]["part"] == {"type": "summary_text", "text": ""}
    assert [event["delta"] for event in events[1:3]] == ["Let me ", "look."]
    assert events[3]["text"] == "Let me look."
    assert events[4]["part"] == {"type": "summary_text", "text": "Let me look."}
    item = whole(asked)["output"][0]
    assert item["summary"] == [{"type": "summary_text", "text": "Let me look."}]
    assert item["content"] == [], "the text is not sent twice"


def test_the_reasoning_item_is_added_without_its_summary() -> None:
    added = next(event for event in streamed(request(summary="auto")) if event["type"] == "response.output_item.added")
    assert added["item"]["summary"] == []


@pytest.mark.parametrize("summary", [None, "auto"])
def test_a_streamed_response_ends_as_the_whole_one(summary: str | None) -> None:
    asked = request(summary=summary)
    assert streamed(asked)[-1]["response"] == whole(asked)


def test_without_a_summary_reasoning_is_content() -> None:
    item = whole(request(effort="low"))["output"][0]
    assert (item["summary"], item["content"]) == ([], [{"type": "reasoning_text", "text": "Let me look."}])


def test_an_unknown_summary_is_rejected_with_its_place() -> None:
    with pytest.raises(InvalidValue) as rejected:
        request(summary="long")
    assert rejected.value.param == "reasoning.summary"
