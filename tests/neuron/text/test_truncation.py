from typing import Any

import pytest

from cortex.neuron.text.model import TextModel
from cortex.neuron.text.preparation import render_within
from cortex.neuron.text.template.prompt import PromptRules
from cortex.wire.errors import ContextLengthExceeded
from cortex.wire.requests import GenerateRequest, Message, Sampling, Text, ToolCall, ToolResult


@pytest.fixture(scope="module")
def text(make_model: Any) -> TextModel:
    model: TextModel = make_model("qwen3")
    return model


def user(text: str) -> Message:
    return Message(role="user", parts=(Text(text=text),))


def conversation(*messages: Message, **fields: Any) -> GenerateRequest:
    rules = Message(role="system", parts=(Text(text="rules"),))
    return GenerateRequest(model="m", messages=(rules, *messages), truncate=True, **fields)


def turns(count: int) -> list[Message]:
    reply = Message(role="assistant", parts=(Text(text="y" * 40),))
    return [message for number in range(count) for message in (user(f"{number:02}" + "x" * 40), reply)]


def first_words(request: GenerateRequest) -> list[str]:
    return [part.text[:2] for message in request.messages for part in message.parts if isinstance(part, Text)]


def test_keeps_a_conversation_that_fits(text: TextModel) -> None:
    request = conversation(*turns(4), user("now"))
    kept, rendered = render_within(text, request, PromptRules(len(text.render(request).ids) + 1))
    assert kept == request
    assert rendered == text.render(request)


@pytest.mark.parametrize("context_tokens", [260, 400, 700])
def test_drops_the_oldest_turns_and_leaves_room_for_the_response(text: TextModel, context_tokens: int) -> None:
    request = conversation(*turns(30), user("now"), sampling=Sampling(max_tokens=20))
    kept, rendered = render_within(text, request, PromptRules(context_tokens))
    words = first_words(kept)
    assert (words[0], words[-1]) == ("ru", "no")
    assert kept.messages[1].role == "user"
    assert kept.messages[1:] == request.messages[-len(kept.messages) + 1 :]
    assert len(rendered.ids) <= context_tokens - 20
    assert len(rendered.ids) > context_tokens - 20 - 2 * 70  # one more turn would not fit


def test_cuts_a_long_last_turn_before_a_call_and_not_before_its_result(text: TextModel) -> None:
    steps = [
        message
        for number in range(10)
        for message in (
            Message(role="assistant", parts=(ToolCall(id=f"c{number}", name="f", arguments="{}"),)),
            Message(role="tool", parts=(ToolResult(call_id=f"c{number}", parts=(Text(text="z" * 30),)),)),
        )
    ]
    kept, _ = render_within(text, conversation(user("go"), *steps), PromptRules(400))
    assert [message.role for message in kept.messages[:3]] == ["system", "assistant", "tool"]
    assert kept.messages[-1] == steps[-1]


@pytest.mark.parametrize("size", [300, 100_000])
def test_rejects_a_last_message_that_does_not_fit(text: TextModel, size: int) -> None:
    with pytest.raises(ContextLengthExceeded):
        render_within(text, conversation(*turns(3), user("x" * size)), PromptRules(200))


def test_rejects_an_overflow_without_permission_to_truncate(text: TextModel) -> None:
    request = GenerateRequest(model="m", messages=(user("x" * 5000),))
    with pytest.raises(ContextLengthExceeded):
        render_within(text, request, PromptRules(200))


def test_keeps_to_the_nodes_limit_for_prompts(text: TextModel) -> None:
    request = conversation(*turns(30), user("now"), sampling=Sampling(max_tokens=20))
    _, rendered = render_within(text, request, PromptRules(100_000, max_prompt_tokens=300))
    assert 200 < len(rendered.ids) <= 300
