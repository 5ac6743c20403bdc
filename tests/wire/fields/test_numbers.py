"""Every numeric field of every dialect has a range; the error for a value outside names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cortex.wire.dialects.registry import DIALECTS
from cortex.wire.errors import InvalidValue, MalformedJSON
from cortex.wire.fields.body import LARGEST_COUNT, LARGEST_INTEGER, LARGEST_TOKEN, Fields

BODIES: dict[str, dict[str, Any]] = {
    "openai_chat": {"messages": [{"role": "user", "content": "hi"}], "logprobs": True},
    "openai_completions": {"prompt": "hi"},
    "openai_responses": {"input": "hi"},
    "anthropic_messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
    "ollama_chat": {"messages": [{"role": "user", "content": "hi"}]},
    "ollama_generate": {"prompt": "hi"},
    "llama_cpp_infill": {"input_prefix": "hi"},
    "openai_compaction": {"input": "hi"},
}
SHARED = {
    "temperature": (0, 2),
    "top_k": (-1, LARGEST_COUNT),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "repetition_window": (-1, LARGEST_COUNT),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "seed": (-LARGEST_INTEGER, LARGEST_INTEGER),
    "max_tokens": (1, LARGEST_COUNT),
    "min_tokens": (0, LARGEST_COUNT),
    "n": (1, 128),
}
OLLAMA: dict[str, tuple[float, float]] = {"keep_alive": (-LARGEST_COUNT, LARGEST_COUNT), "top_logprobs": (0, 20)}
RANGES: dict[str, dict[str, tuple[float, float]]] = {
    "openai_chat": {**SHARED, "max_completion_tokens": (1, LARGEST_COUNT), "top_logprobs": (0, 20)},
    "openai_completions": {**SHARED, "max_tokens": (-1, LARGEST_COUNT), "logprobs": (0, 20), "best_of": (1, 1)},
    "openai_responses": {
        "temperature": (0, 2),
        "top_p": (0, 1),
        "top_k": (-1, LARGEST_COUNT),
        "min_p": (0, 1),
        "presence_penalty": (-2, 2),
        "frequency_penalty": (-2, 2),
        "seed": (-LARGEST_INTEGER, LARGEST_INTEGER),
        "max_output_tokens": (1, LARGEST_COUNT),
        "top_logprobs": (0, 20),
    },
    "anthropic_messages": {
        "temperature": (0, 1),
        "top_p": (0, 1),
        "top_k": (0, LARGEST_COUNT),
        "max_tokens": (0, LARGEST_COUNT),
    },
    "ollama_chat": OLLAMA,
    "ollama_generate": OLLAMA,
    "llama_cpp_infill": {
        "temperature": (0, 100),
        "presence_penalty": (-100, 100),
        "n_predict": (-LARGEST_COUNT, LARGEST_COUNT),
    },
    "openai_compaction": {"temperature": (0, 2), "max_output_tokens": (1, LARGEST_COUNT)},
}
CASES = [(dialect, field, *ends) for dialect, fields in RANGES.items() for field, ends in fields.items()]


def parse(dialect: str, **fields: Any) -> Any:
    return DIALECTS[dialect].parse(json.dumps({"model": "m", **BODIES[dialect], **fields}).encode())


def test_table_covers_every_dialect() -> None:
    assert set(BODIES) == set(RANGES) == set(DIALECTS)


@pytest.mark.parametrize(("dialect", "field", "low", "high"), CASES)
def test_accepts_both_ends_of_a_range_and_rejects_values_beyond(
    dialect: str, field: str, low: float, high: float
) -> None:
    for value in (low, high):
        parse(dialect, **{field: value})
    beyond = (low - 1, high + 1, 2**63, -(2**63) - 1, 2**64, -(2**70), 10**400, 1e300, -1e300)
    for value in beyond:
        with pytest.raises(InvalidValue, match=field) as caught:
            parse(dialect, **{field: value})
        assert caught.value.param == field
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize("dialect", ["ollama_chat", "ollama_generate"])
@pytest.mark.parametrize("name", ["temperature", "presence_penalty", "frequency_penalty"])
def test_options_of_ollama_go_beyond_the_bounds_of_openai(dialect: str, name: str) -> None:
    assert getattr(parse(dialect, options={name: 100}).sampling, name) == 100
    with pytest.raises(InvalidValue, match=name):
        parse(dialect, options={name: 101})


@pytest.mark.parametrize(
    ("dialect", "fields", "most"),
    [
        ("openai_chat", {"n_predict": 0}, 0),
        ("openai_chat", {"n_predict": -1}, None),
        ("openai_chat", {"max_tokens": -1}, None),
        ("openai_completions", {"max_tokens": -1}, None),
        ("openai_completions", {"max_tokens": 0}, 0),
        ("openai_completions", {"n_predict": 0}, 0),
        ("anthropic_messages", {"max_tokens": 0}, 0),
        ("ollama_chat", {"options": {"num_predict": 0}}, 0),
        ("ollama_generate", {"options": {"num_predict": -1}}, None),
        ("ollama_generate", {"options": {"num_predict": -2}}, None),
        ("llama_cpp_infill", {"n_predict": 0}, 0),
        ("llama_cpp_infill", {"n_predict": -1}, None),
    ],
)
def test_limit_of_zero_is_no_tokens_and_a_negative_one_is_no_limit(
    dialect: str, fields: dict[str, Any], most: int | None
) -> None:
    assert parse(dialect, **fields).sampling.max_tokens == most


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e999"])
@pytest.mark.parametrize(("dialect", "field"), [case[:2] for case in CASES])
def test_number_that_json_cannot_write_is_malformed(dialect: str, field: str, number: str) -> None:
    body = json.dumps({"model": "m", **BODIES[dialect], field: "here"}).replace('"here"', number)
    with pytest.raises((MalformedJSON, InvalidValue)):
        DIALECTS[dialect].parse(body.encode())


@pytest.mark.parametrize("dialect", ["openai_chat", "openai_completions"])
@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("stop_token_ids", [3, 2**31], "stop_token_ids"),
        ("stop_token_ids", [-1], "stop_token_ids"),
        ("stop_token_ids", [2**70], "stop_token_ids"),
        ("logit_bias", {str(2**31): 1}, f"logit_bias.{2**31}"),
        ("logit_bias", {"5": 100.5}, "logit_bias.5"),
        ("logit_bias", {"5": -(10**400)}, "logit_bias.5"),
        ("logit_bias", {"-5": 1}, "logit_bias.-5"),
    ],
)
def test_numbers_in_arrays_and_objects_have_a_range(dialect: str, field: str, value: Any, param: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        parse(dialect, **{field: value})
    assert caught.value.param == param
    parse(dialect, stop_token_ids=[0, LARGEST_TOKEN], logit_bias={"0": -100, str(LARGEST_TOKEN): 100})


@pytest.mark.parametrize("prompt", [[1, 2**31], [2**64], [-1], [[1, 10**400]]])
def test_rejects_a_prompt_of_invalid_token_ids(prompt: list[Any]) -> None:
    with pytest.raises(InvalidValue) as caught:
        parse("openai_completions", prompt=prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("budget", [-1, 2**53, 2**63, 2**70])
def test_thinking_budget_has_a_range(budget: int) -> None:
    with pytest.raises(InvalidValue) as caught:
        parse("anthropic_messages", thinking={"type": "enabled", "budget_tokens": budget})
    assert caught.value.param == "thinking.budget_tokens"


def test_nan_is_in_no_range() -> None:
    with pytest.raises(InvalidValue):
        Fields({"x": float("nan")}).number("x", low=-1, high=1)
    with pytest.raises(InvalidValue):
        Fields({"x": float("inf")}).integer("x", low=-1, high=1)
