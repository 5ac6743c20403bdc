from typing import Any

import msgspec
import pytest

from cortex.wire.dialects import openai_chat, openai_completions
from cortex.wire.events import AnyEvent, Finish, Start, Usage

EMPTY: list[AnyEvent] = [Start(id="id", model="m", created=1, prompt_tokens=3), Finish(reason="stop", usage=Usage())]


@pytest.mark.parametrize(("wanted", "expected"), [(True, {"content": [], "refusal": None}), (False, None)])
def test_empty_chat_response_has_the_fields_of_the_real_api(wanted: bool, expected: Any) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "logprobs": wanted}
    request = openai_chat.parse(msgspec.json.encode(body))
    (choice,) = msgspec.json.decode(openai_chat.fold(EMPTY, request, id="a", created=1, model="m"))["choices"]
    assert choice["logprobs"] == expected
    assert choice["message"] == {"role": "assistant", "content": "", "refusal": None}
    again = [*body["messages"], choice["message"], {"role": "user", "content": "more"}]  # type: ignore[misc]
    assert len(openai_chat.parse(msgspec.json.encode(body | {"messages": again})).messages) == 3


@pytest.mark.parametrize("wanted", [0, 2, None])
def test_empty_completion_has_the_fields_of_the_real_api(wanted: int | None) -> None:
    request = openai_completions.parse(msgspec.json.encode({"model": "m", "prompt": "a", "logprobs": wanted}))
    (choice,) = msgspec.json.decode(openai_completions.fold(EMPTY, request, id="a", created=1, model="m"))["choices"]
    nothing: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    assert choice["logprobs"] == (None if wanted is None else nothing)
