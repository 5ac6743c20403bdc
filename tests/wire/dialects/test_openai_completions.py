from typing import Any

import msgspec
import pytest

from cortex.wire.dialects.openai_completions import Encoder, fold, parse
from cortex.wire.errors import InvalidValue
from cortex.wire.events import AnyEvent, Finish, Logprobs, Start, TextDelta, TokenLogprob, Usage
from cortex.wire.requests import GenerateRequest
from cortex.wire.sse import Parser


def read(**fields: Any) -> GenerateRequest:
    return parse(msgspec.json.encode({"model": "m", **fields}))


def test_parses_prompts() -> None:
    assert read(prompt="hello").prompt == "hello"
    assert read(prompt=["hello"]).prompt == "hello"
    assert read(prompt=[1, 2]).prompt == (1, 2)
    assert read(prompt=[[1, 2]]).prompt == (1, 2)
    assert read(prompt="").prompt == ""


def test_parses_lists_of_prompts() -> None:
    for prompts in (("a", "b"), ((1, 2), (3,))):
        request = read(prompt=prompts, n=2)
        assert [single.prompt for single in request.one_per_prompt] == list(prompts)
        assert request.num_choices == 4
    assert read(prompt="a", n=2).num_choices == 2


def test_rejects_more_choices_than_one_request_may_have() -> None:
    assert read(prompt=["a"] * 64, n=2).num_choices == 128
    with pytest.raises(InvalidValue, match="130 choices") as caught:
        read(prompt=["a"] * 65, n=2)
    assert caught.value.param == "prompt"


def test_accepts_no_tokens_with_and_without_an_echo() -> None:
    assert read(prompt="a", max_tokens=0).sampling.max_tokens == 0
    assert read(prompt="a", max_tokens=0, echo=True, logprobs=1).sampling.top_logprobs == 1


@pytest.mark.parametrize(
    "prompt", [None, [], ["a", 1], ["a", [1]], [[1], []], [[1], [-2]], [[1], ["a"]], [1, "a"], [-1], [True], 3]
)
def test_rejects_unsupported_prompts(prompt: Any) -> None:
    with pytest.raises(InvalidValue) as caught:
        read(prompt=prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("extra", [{"suffix": "x", "echo": True}, {"best_of": 3}, {"logprobs": 21}])
def test_rejects_unsupported_options(extra: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue) as caught:
        read(prompt="x", **extra)
    assert caught.value.param in extra


def test_logprobs_have_offsets_into_the_whole_text() -> None:
    request = read(prompt="x", logprobs=1, stream=True, stream_options={"include_usage": True})
    tokens = [TokenLogprob("ab", 1, -0.5, (97, 98), (TokenLogprob("ab", 1, -0.5, (97, 98)),)),
              TokenLogprob("c", 2, -1.0, (99,), ())]  # fmt: skip
    events: list[AnyEvent] = [
        Start(id="i", model="m", created=1),
        Logprobs(tokens=(tokens[0],)),
        TextDelta(text="ab"),
        Logprobs(tokens=(tokens[1],)),
        TextDelta(text="c"),
        Finish(reason="stop", usage=Usage(prompt_tokens=1, completion_tokens=2)),
    ]
    encoder = Encoder(request, id="cmpl-1", created=1, model="m")
    frames = Parser().feed(b"".join(encoder.encode(event) for event in events))
    chunks = [msgspec.json.decode(frame.data) for frame in frames[:-1]]
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks[:2]] == [[0], [2]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 3
    assert frames[-1].data == "[DONE]"
    whole = msgspec.json.decode(fold(events, request, id="cmpl-1", created=1, model="m"))
    assert whole["choices"][0]["text"] == "abc"
    assert whole["choices"][0]["logprobs"] == {
        "tokens": ["ab", "c"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"ab": -0.5}, {"c": -1.0}],
        "text_offset": [0, 2],
    }


def test_offsets_count_the_echoed_prompt() -> None:
    request = read(prompt="xyz", logprobs=0, echo=True)
    events: list[AnyEvent] = [
        Start(id="i", model="m", created=1),
        TextDelta(text="xyz"),
        Logprobs(tokens=(TokenLogprob("ab", 1, -0.5, (97, 98)),)),
        TextDelta(text="ab"),
        Finish(reason="stop", usage=Usage()),
    ]
    encoder = Encoder(request, id="cmpl-1", created=1, model="m")
    streamed = Parser().feed(b"".join(encoder.encode(event) for event in events))
    chunks = [msgspec.json.decode(frame.data)["choices"][0] for frame in streamed[:-1]]
    assert [chunk["logprobs"]["text_offset"] for chunk in chunks if chunk["logprobs"]] == [[3]]
    (whole,) = msgspec.json.decode(fold(events, request, id="cmpl-1", created=1, model="m"))["choices"]
    assert (whole["text"], whole["logprobs"]["text_offset"]) == ("xyzab", [3])


def test_echo_with_logprobs_scores_the_prompt_from_its_second_token_on() -> None:
    """A control token before the text has a score and no characters."""
    request = read(prompt="xy", logprobs=1, echo=True)
    likeliest = TokenLogprob("q", 4, -0.1, (113,))
    prompt = (
        TokenLogprob("<s>", 0, None, ()),
        TokenLogprob("x", 1, -2.0, (120,), (likeliest,), rank=7),
        TokenLogprob("y", 2, -0.3, (121,), (TokenLogprob("y", 2, -0.3, (121,)),), rank=1),
    )
    events: list[AnyEvent] = [
        Start(id="i", model="m", created=1),
        Logprobs(tokens=prompt),
        TextDelta(text="xy"),
        Logprobs(tokens=(TokenLogprob("z", 3, -0.5, (122,), (TokenLogprob("z", 3, -0.5, (122,)),)),)),
        TextDelta(text="z"),
        Finish(reason="length", usage=Usage()),
    ]
    (whole,) = msgspec.json.decode(fold(events, request, id="cmpl-1", created=1, model="m"))["choices"]
    assert whole["text"] == "xyz"
    assert whole["logprobs"] == {
        "tokens": ["<s>", "x", "y", "z"],
        "token_logprobs": [None, -2.0, -0.3, -0.5],
        "top_logprobs": [None, {"x": -2.0, "q": -0.1}, {"y": -0.3}, {"z": -0.5}],
        "text_offset": [0, 0, 1, 2],
    }
    encoder = Encoder(request, id="cmpl-1", created=1, model="m")
    frames = Parser().feed(b"".join(encoder.encode(event) for event in events))
    logprobs = [msgspec.json.decode(frame.data)["choices"][0]["logprobs"] for frame in frames[:-1]]
    assert [one["text_offset"] for one in logprobs if one] == [[0, 0, 1], [2]]
