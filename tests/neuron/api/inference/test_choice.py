import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cortex.neuron.api.inference.choice import Choice, ChoiceContext, Stopwatch
from cortex.neuron.engine.request import StepOutput, TokenLogprobs
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.template.prompt import Rendered
from cortex.wire.errors import GenerationFailed, Overloaded
from cortex.wire.events import AnyEvent
from cortex.wire.requests import GenerateRequest, Message, Sampling, Text, Thinking, Tool, ToolCall
from cortex.wire.response import Block, gather

STOPWATCH = Stopwatch(0.0, 0.0)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
OUTPUT = "I think.\n</think>\n\nSo: naïve 🙂 answer. " + CALL


def context(text: TextModel, *, stop: tuple[str, ...] = (), thinks: bool = True, **sampling: Any) -> ChoiceContext:
    request = GenerateRequest(
        model="m",
        messages=(Message(role="user", parts=(Text(text="hi"),)),),
        tools=(Tool(name="f", parameters={}),),
        sampling=Sampling(stop=stop, **sampling),
        return_token_ids=True,
    )
    rendered = Rendered("<think>\n" if thinks else "", (1, 2, 3), (), thinks)
    return ChoiceContext("id", 1, "m", request, rendered, text, text.eos_ids)


def push_in_pieces(
    choice: Choice, ids: list[int], cuts: list[int], finish: Any = "stop", *, scored: bool = False
) -> list[AnyEvent]:
    edges = [0, *sorted({cut % len(ids) for cut in cuts} - {0}), len(ids)]
    events: list[AnyEvent] = []
    for start, end in itertools.pairwise(edges):
        last = end == len(ids)
        cached = 2 if start == 0 else None
        scores = tuple(TokenLogprobs(-float(place)) for place in range(start, end)) if scored else ()
        drafts = end - start - 1
        output = StepOutput(
            "r",
            tuple(ids[start:end]),
            scores,
            cached,
            finish if last else None,
            num_drafted=drafts,
            num_accepted=drafts,
        )
        events += choice.push([output], STOPWATCH)
    return events


def without_ids(blocks: tuple[Block, ...]) -> list[Block]:
    """Tool calls get a new id in every response."""
    return [replace(block, id="") if isinstance(block, ToolCall) else block for block in blocks]


@given(cuts=st.lists(st.integers(0, 1000), max_size=20), stop=st.sampled_from([(), ("answer",), ("nope",), ("🙂",)]))
def test_events_do_not_depend_on_how_tokens_are_batched(
    text: TextModel, cuts: list[int], stop: tuple[str, ...]
) -> None:
    ids = [*text.encode(OUTPUT), text.eos_ids[0]]
    (one_by_one, split) = (
        gather(push_in_pieces(Choice(context(text, stop=stop, logprobs=True), 0), ids, places, scored=True))[0]
        for places in (list(range(len(ids))), cuts)
    )
    assert without_ids(split.blocks) == without_ids(one_by_one.blocks)
    assert split.finish.reason == one_by_one.finish.reason
    assert split.finish.stop_sequence == one_by_one.finish.stop_sequence
    assert (split.logprobs, split.token_ids) == (one_by_one.logprobs, one_by_one.token_ids)
    drafted = {"drafted_tokens": 0, "accepted_draft_tokens": 0}
    assert replace(split.finish.usage, **drafted) == replace(one_by_one.finish.usage, **drafted)
    assert split.finish.usage.accepted_draft_tokens <= split.finish.usage.completion_tokens


def test_reports_blocks_usage_and_finish_reason(text: TextModel) -> None:
    ids = [*text.encode(OUTPUT), text.eos_ids[0]]
    (message,) = gather(push_in_pieces(Choice(context(text), 0), ids, list(range(len(ids)))))
    assert message.reasoning.strip() == "I think."
    assert message.text.strip() == "So: naïve 🙂 answer."
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("f", '{"a": "é"}')]
    assert message.finish.reason == "tool_calls"
    usage = message.finish.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (3, 2, len(ids))
    assert len("I think.") <= usage.reasoning_tokens <= len("I think.\n</think>\n\n")


@pytest.mark.parametrize(("stop", "cut_at"), [((), 1000), (("brief",), 1000), ((), 60)])
def test_incomplete_tool_call_finishes_with_length(text: TextModel, stop: tuple[str, ...], cut_at: int) -> None:
    output = '<tool_call>\n{"name": "f", "arguments": {"a": "rm -r /tmp/brief'
    ids = [*text.encode(output)[:cut_at], text.eos_ids[0]]
    (message,) = gather(push_in_pieces(Choice(context(text, thinks=False, stop=stop), 0), ids, list(range(len(ids)))))
    (call,) = message.tool_calls
    assert call.arguments.startswith('{"a": "rm -r /')
    assert (message.finish.reason, message.finish.stop_sequence) == ("length", None)


@pytest.mark.parametrize("output", ["<tool_call>", '<tool_call>\n{"name": "Ba', '<tool_call>\n{"name": "f", "arg'])
@pytest.mark.parametrize("finish", ["length", "stop"])
def test_call_cut_before_its_arguments_is_not_text(text: TextModel, output: str, finish: Any) -> None:
    ids = text.encode(f"hm</think>I look.\n{output}")
    (message,) = gather(push_in_pieces(Choice(context(text), 0), ids, [], finish=finish))
    assert (message.text, message.tool_calls, message.finish.reason) == ("I look.", (), "length")


def test_reasoning_cut_by_the_limit_stays_reasoning(text: TextModel) -> None:
    ids = text.encode("I was just thinking that")
    (message,) = gather(push_in_pieces(Choice(context(text), 0), ids, [3], finish="length"))
    assert (message.reasoning, message.text, message.finish.reason) == ("I was just thinking that", "", "length")
    assert message.finish.usage.reasoning_tokens == len(ids)


def test_stop_string_ends_the_choice_before_the_engine(text: TextModel) -> None:
    choice = Choice(context(text, stop=("END",), thinks=False), 0)
    events = choice.push([StepOutput("r", tuple(text.encode("one END two")), (), 0, None)], STOPWATCH)
    (message,) = gather(events)
    assert (message.text, message.finish.stop_sequence) == ("one ", "END")
    assert choice.ended
    assert choice.push([StepOutput("r", (1,), (), None, "length")], STOPWATCH) == []


def test_tokens_behind_a_stop_string_are_neither_counted_nor_returned(text: TextModel) -> None:
    ids = tuple(text.encode("one END two"))
    until_stop = len(text.encode("one END"))
    choice = Choice(context(text, stop=("END",), thinks=False), 0)
    (message,) = gather(
        choice.push([StepOutput("r", ids, (), 0, "length", num_drafted=20, num_accepted=len(ids) - 1)], STOPWATCH)
    )
    assert message.finish.usage.completion_tokens == until_stop
    assert message.finish.usage.accepted_draft_tokens == until_stop
    assert message.token_ids == ids[:until_stop]


def test_log_probabilities_are_those_of_the_text_without_the_end_token(text: TextModel) -> None:
    ids = [*text.encode("yes"), text.eos_ids[0]]
    events = push_in_pieces(Choice(context(text, thinks=False, logprobs=True), 0), ids, [1], scored=True)
    (message,) = gather(events)
    assert "".join(token.token for token in message.logprobs) == message.text == "yes"
    assert message.finish.usage.completion_tokens == len(ids)


@given(cuts=st.lists(st.integers(0, 1000), max_size=20))
def test_reasoning_is_part_of_the_text_if_the_client_says_so(text: TextModel, cuts: list[int]) -> None:
    ids = [*text.encode(OUTPUT), text.eos_ids[0]]
    given = context(text)
    inline = replace(given.request, thinking=Thinking(inline=True))
    (message,) = gather(push_in_pieces(Choice(dataclasses.replace(given, request=inline), 0), ids, cuts))
    assert message.reasoning == ""
    assert message.text.strip() == "<think>\nI think.\n</think>\n\nSo: naïve 🙂 answer."
    assert message.tool_calls
    assert message.finish.usage.reasoning_tokens > 0


def test_response_without_tokens_returns_none(text: TextModel) -> None:
    choice = Choice(context(text, thinks=False, max_tokens=0), 0)
    (message,) = gather(choice.push([StepOutput("r", tuple(text.encode("a")), (), 2, "length")], STOPWATCH))
    assert (message.text, message.token_ids, message.finish.reason) == ("", (), "length")
    assert (message.finish.usage.completion_tokens, message.finish.usage.cached_tokens) == (0, 2)


def test_shows_a_partial_stop_string_at_the_end(text: TextModel) -> None:
    ids = text.encode("the EN")
    (message,) = gather(push_in_pieces(Choice(context(text, stop=("END",), thinks=False), 0), ids, [], finish="length"))
    assert message.text == "the EN"


def test_replaces_a_character_cut_by_the_limit(text: TextModel) -> None:
    ids = text.encode("a🙂")[:-1]
    (message,) = gather(push_in_pieces(Choice(context(text, thinks=False), 0), ids, [1, 2], finish="length"))
    assert message.text == "a�"


def test_counts_the_prompt_once_among_choices(text: TextModel) -> None:
    ids = [*text.encode("x"), text.eos_ids[0]]
    events = [event for index in range(3) for event in push_in_pieces(Choice(context(text, n=3), index), ids, [])]
    assert [choice.finish.usage.prompt_tokens for choice in gather(events)] == [3, 0, 0]


def test_raises_when_the_engine_ends_the_request(text: TextModel) -> None:
    with pytest.raises(GenerationFailed, match="not finite"):
        Choice(context(text), 0).push([StepOutput("r", finish="error", error="logits are not finite")], STOPWATCH)
    with pytest.raises(Overloaded):
        Choice(context(text), 0).push([StepOutput("r", finish="cancelled")], STOPWATCH)
