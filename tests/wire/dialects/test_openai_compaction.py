"""A conversation that is summed up, and its summary as the input of a later request."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from openai.types.responses import ResponseCompactionItem

from cortex.wire.dialects import openai_responses
from cortex.wire.dialects.openai_responses import compaction
from cortex.wire.dialects.openai_responses.compaction import MAX_KEPT_CHARS, PROMPT
from cortex.wire.errors import GenerationFailed, InvalidValue
from cortex.wire.events import AnyEvent, Finish, ReasoningDelta, Start, TextDelta, Usage
from cortex.wire.requests import Text

CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "find the bug"},
    {"type": "function_call", "call_id": "c", "name": "grep", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "x.py"},
    {"role": "assistant", "content": "it is in x.py"},
    {"role": "user", "content": [{"type": "input_text", "text": "fix "}, {"type": "input_text", "text": "it"}]},
]
TOOLS = [{"type": "function", "name": "grep", "parameters": {"type": "object"}}]


def read(**fields: Any) -> Any:
    return compaction.parse(msgspec.json.encode({"model": "m", "input": CONVERSATION, **fields}))


def folded(request: Any, *events: AnyEvent) -> dict[str, Any]:
    start = Start(id="x", model="m", created=1, prompt_tokens=9)
    finish = Finish(reason="stop", usage=Usage(prompt_tokens=9, completion_tokens=4))
    body = compaction.fold([start, *events, finish], request, id="cmp_1", created=7, model="m")
    made: dict[str, Any] = msgspec.json.decode(body)
    return made


def test_conversation_becomes_messages_of_the_user_and_a_summary() -> None:
    request = read(
        instructions="be brief", tools=TOOLS, tool_choice="required", text={"format": {"type": "json_object"}}
    )
    assert (request.tools, request.output, request.tool_choice.mode) == ((), None, "auto")
    assert request.messages[-1].parts == (Text(text=PROMPT),)
    roles = [message.role for message in request.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user", "user"]
    made = folded(request, ReasoningDelta(text="hm"), TextDelta(text="The bug "), TextDelta(text="is in x.py.\n"))
    assert (made["id"], made["object"], made["created_at"]) == ("resp_1", "response.compaction", 7)
    *kept, item = made["output"]
    ResponseCompactionItem.model_validate(item)
    assert [message["content"][0]["text"] for message in kept] == ["find the bug", "fix it"]
    assert (item["type"], "x.py" in item["encrypted_content"]) == ("compaction", False)
    assert made["usage"]["total_tokens"] == 13

    body = {"model": "m", "input": [*made["output"], {"role": "user", "content": "go on"}]}
    again = openai_responses.parse(msgspec.json.encode(body))
    said = [message.parts[0].text for message in again.messages if isinstance(message.parts[0], Text)]
    assert said[:2] == ["find the bug", "fix it"]
    assert said[2].endswith("before this point:\n\nThe bug is in x.py.")
    assert said[3] == "go on"


def test_only_the_latest_messages_are_kept() -> None:
    texts = [character * (MAX_KEPT_CHARS // 2) for character in "abc"]
    request = read(input=[{"role": "user", "content": text} for text in texts])
    *kept, _ = folded(request, TextDelta(text="s"))["output"]
    assert [message["content"][0]["text"][0] for message in kept] == ["b", "c"]


def test_rejects_a_stream_a_foreign_summary_and_an_empty_one() -> None:
    with pytest.raises(InvalidValue) as caught:
        read(stream=True)
    assert caught.value.param == "stream"
    for content in ("gAAAA-of-another-server", "cortex-summary-1.no base64", "cortex-summary-1./w=="):
        with pytest.raises(InvalidValue) as caught:
            read(input=[{"type": "compaction", "encrypted_content": content}])
        assert caught.value.param == "input[0].encrypted_content"
    with pytest.raises(GenerationFailed):
        folded(read(), ReasoningDelta(text="only reasoning"))


@pytest.mark.parametrize(
    ("asked", "limit"), [({}, 8192), ({"max_output_tokens": 50}, 50), ({"max_output_tokens": 9000}, 8192)]
)
def test_summary_has_a_limit_and_needs_no_reasoning(asked: dict[str, Any], limit: int) -> None:
    request = read(**asked)
    assert request.sampling.max_tokens == limit
    assert request.thinking.switch is False
    assert read(reasoning={"effort": "low"}).thinking.switch is True
