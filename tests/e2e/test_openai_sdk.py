"""The official OpenAI client against the whole chain: gateway, neuron, device worker, engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import openai
import pytest

from cortex.cli.up.demo import SMOLLM2

from ..waiting import WAIT_S

if TYPE_CHECKING:
    from .conftest import Run

pytestmark = pytest.mark.e2e

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="module")
def client(up: Run) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{up.url}/v1", api_key="any", max_retries=0, timeout=WAIT_S)


def ask(client: openai.OpenAI, **options: Any) -> Any:
    defaults: dict[str, Any] = {"model": SMOLLM2.id, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    return client.chat.completions.create(**{**defaults, **options})


def test_the_model_knows_the_capital_of_france(client: openai.OpenAI) -> None:
    response = ask(client)
    assert "Paris" in response.choices[0].message.content
    assert response.choices[0].finish_reason == "stop"
    assert response.model == SMOLLM2.id


def test_usage_is_counted(client: openai.OpenAI) -> None:
    usage = ask(client).usage
    assert usage.prompt_tokens > 10
    assert 0 < usage.completion_tokens <= 24
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_stream_has_the_text_of_the_whole_response(client: openai.OpenAI) -> None:
    whole = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert len(chunks) > 2, "text, reason and usage; a busy node sends several tokens at once"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_system_prompt_changes_the_response(client: openai.OpenAI) -> None:
    pirate = [{"role": "system", "content": "You always answer in French."}, *QUESTION]
    assert ask(client, messages=pirate).choices[0].message.content != ask(client).choices[0].message.content


def test_response_ends_before_a_stop_string(client: openai.OpenAI) -> None:
    response = ask(client, stop=["France"])
    assert "France" not in response.choices[0].message.content
    assert response.choices[0].finish_reason == "stop"


def test_the_token_limit_is_honoured(client: openai.OpenAI) -> None:
    response = ask(client, max_tokens=3)
    assert response.choices[0].finish_reason == "length"
    assert response.usage.completion_tokens == 3


def test_same_seed_draws_the_same_response(client: openai.OpenAI) -> None:
    responses = {ask(client, temperature=1, seed=7, max_tokens=12).choices[0].message.content for _ in range(2)}
    assert len(responses) == 1


def test_responses_over_a_websocket_continue_without_being_stored(client: openai.OpenAI) -> None:
    with client.responses.connect() as connection:
        ids: list[str] = []
        texts: list[str] = []
        for text in ("The capital of France is Paris. Say: Paris.", "Say it again."):
            more = {"previous_response_id": ids[-1]} if ids else {}
            connection.response.create(
                model=SMOLLM2.id, input=text, store=False, temperature=0, max_output_tokens=8, **more
            )
            for event in connection:
                if event.type in ("response.completed", "response.incomplete"):
                    ids.append(event.response.id)
                    texts.append(event.response.output_text)
                    input_tokens = event.response.usage.input_tokens
                    break
                assert event.type != "error", event
    assert all(texts)
    assert input_tokens > 40, "the second request has the first one before it"


def test_responses_api_responds(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=SMOLLM2.id, input="What is the capital of Japan?", temperature=0, max_output_tokens=24
    )
    assert "Tokyo" in response.output_text
    assert response.usage is not None
    assert response.usage.output_tokens > 0


def test_completions_continue_a_raw_prompt(client: openai.OpenAI) -> None:
    completion = client.completions.create(
        model=SMOLLM2.id, prompt="The capital of France is", temperature=0, max_tokens=4
    )
    assert "Paris" in completion.choices[0].text


def test_several_streams_at_once_do_not_mix(client: openai.OpenAI) -> None:
    cities = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Germany": "Berlin"}

    def stream(country: str) -> str:
        question = [{"role": "user", "content": f"What is the capital of {country}? Answer in one sentence."}]
        chunks = ask(client, messages=question, stream=True, max_tokens=8)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    alone = {country: stream(country) for country in cities}
    with ThreadPoolExecutor(len(cities)) as pool:
        together = dict(zip(cities, pool.map(stream, cities), strict=True))
    assert together == alone
    assert "Paris" in together["France"]


def test_unknown_model_is_a_404_that_names_the_right_one(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as rejection:
        ask(client, model="smollm2-135m-instrukt")
    assert rejection.value.code == "model_not_found"
    assert SMOLLM2.id in rejection.value.message


def test_any_key_is_accepted_while_none_are_configured(up: Run) -> None:
    client = openai.OpenAI(base_url=f"{up.url}/v1", api_key="not a key at all !", max_retries=0, timeout=WAIT_S)
    assert ask(client, max_tokens=1).choices


def test_prompt_longer_than_the_context_is_rejected_with_both_counts(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as rejection:
        ask(client, messages=[{"role": "user", "content": "word " * 20_000}])
    assert rejection.value.code == "context_length_exceeded"
    assert "8192" in rejection.value.message.replace(",", "")


def test_the_listed_model_is_loaded(client: openai.OpenAI) -> None:
    listed = {model.id: model for model in client.models.list()}
    assert listed[SMOLLM2.id].model_dump()["loaded"] is True
    assert client.models.retrieve(SMOLLM2.id).id == SMOLLM2.id
