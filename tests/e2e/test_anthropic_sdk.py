"""The official Anthropic client against the whole chain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anthropic
import pytest

from cortex.cli.up.demo import SMOLLM2

from ..waiting import WAIT_S

if TYPE_CHECKING:
    from .conftest import Run

pytestmark = pytest.mark.e2e

QUESTION: list[anthropic.types.MessageParam] = [
    {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
]
GREEDY = {"temperature": 0}
"""In the body whatever the client's version: newer ones no longer take it as an argument."""


@pytest.fixture(scope="module")
def client(up: Run) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=up.url, api_key="any", max_retries=0, timeout=WAIT_S)


def ask(client: anthropic.Anthropic, **options: Any) -> Any:
    defaults: dict[str, Any] = {"model": SMOLLM2.id, "messages": QUESTION, "max_tokens": 24, "extra_body": GREEDY}
    return client.messages.create(**{**defaults, **options})


def prompt_tokens(response: anthropic.types.Message) -> int:
    """All of the prompt: what this dialect calls input leaves out what came from the cache."""
    return int(response.usage.input_tokens + (response.usage.cache_read_input_tokens or 0))


def test_the_model_knows_the_capital_of_france(client: anthropic.Anthropic) -> None:
    response = ask(client)
    assert response.content[0].type == "text"
    assert "Paris" in response.content[0].text
    assert response.stop_reason == "end_turn"
    assert prompt_tokens(response) > 10
    assert response.usage.output_tokens > 0


def test_stream_has_the_text_of_the_whole_response(client: anthropic.Anthropic) -> None:
    whole = ask(client)
    with client.messages.stream(model=SMOLLM2.id, messages=QUESTION, max_tokens=24, extra_body=GREEDY) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == whole.content[0].text
    assert pieces, "a busy node sends several tokens at once"
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_system_prompt_changes_the_response(client: anthropic.Anthropic) -> None:
    french = ask(client, system="You always answer in French.")
    assert french.content[0].text != ask(client).content[0].text


def test_a_stop_sequence_is_reported(client: anthropic.Anthropic) -> None:
    response = ask(client, stop_sequences=["France"])
    assert response.stop_reason == "stop_sequence"
    assert response.stop_sequence == "France"
    assert all("France" not in block.text for block in response.content)


def test_the_token_limit_is_honoured(client: anthropic.Anthropic) -> None:
    response = ask(client, max_tokens=3)
    assert response.stop_reason == "max_tokens"
    assert response.usage.output_tokens == 3


def test_counted_tokens_equal_the_usage_of_a_response(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=SMOLLM2.id, messages=QUESTION)
    assert counted.input_tokens == prompt_tokens(ask(client, max_tokens=1))


def test_a_wrong_model_is_a_not_found_error(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as rejection:
        ask(client, model="claude-of-another-house")
    assert isinstance(rejection.value.body, dict)
    assert rejection.value.body["error"]["type"] == "not_found_error"


def test_prompt_longer_than_the_context_is_rejected_in_the_words_of_the_service(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        ask(client, messages=[{"role": "user", "content": "word " * 20_000}])
