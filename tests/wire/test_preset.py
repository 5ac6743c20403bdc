"""What an alias adds to a request, in every dialect."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cortex.wire.dialects.registry import DIALECTS
from cortex.wire.preset import Preset

USER = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    "openai_chat": {"model": "m", "messages": [USER]},
    "anthropic_messages": {"model": "m", "max_tokens": 5, "messages": [USER]},
    "openai_responses": {"model": "m", "input": "hi"},
    "ollama_chat": {"model": "m", "messages": [USER]},
    "ollama_generate": {"model": "m", "prompt": "hi"},
}


def applied(preset: Preset, dialect: str, **more: Any) -> Any:
    return DIALECTS[dialect].parse(
        preset.applied(msgspec.json.encode(BODIES[dialect] | more), DIALECTS[dialect].preset)
    )


@pytest.mark.parametrize("dialect", BODIES)
def test_parameters_system_prompt_and_reasoning_reach_the_request_in_every_dialect(dialect: str) -> None:
    preset = Preset(
        set_params={"temperature": 0.25, "max_tokens": 7, "stop": ["X"]}, system="be brief", reasoning="low"
    )
    request = applied(preset, dialect)
    assert (request.sampling.temperature, request.sampling.max_tokens) == (0.25, 7)
    assert request.thinking.effort == "low"
    if dialect != "openai_responses":  # which has no stop sequences
        assert request.sampling.stop == ("X",)
    texts = [part.text for message in request.messages if message.role == "system" for part in message.parts]
    assert texts == ["be brief"]


@pytest.mark.parametrize("dialect", BODIES)
def test_reasoning_none_disables_it(dialect: str) -> None:
    assert applied(Preset(reasoning="none"), dialect).thinking.enabled is False


def test_set_fields_replace_those_of_the_client_and_defaults_do_not() -> None:
    preset = Preset(set_params={"max_tokens": 3}, default_params={"temperature": 0.1, "top_p": 0.5}, system="mine")
    system = {"role": "system", "content": "theirs"}
    request = applied(preset, "openai_chat", max_completion_tokens=9, temperature=1.0, messages=[system, USER])
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (3, 1.0, 0.5)
    assert [message.role for message in request.messages] == ["system", "user"]


def test_defaults_do_not_replace_options_of_ollama() -> None:
    preset = Preset(default_params={"repetition_penalty": 1.5, "temperature": 0.1})
    sampling = applied(preset, "ollama_chat", options={"temperature": 0.9}).sampling
    assert (sampling.temperature, sampling.repetition_penalty) == (0.9, 1.5)


def test_messages_precede_those_of_the_client() -> None:
    turns = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    request = applied(Preset(messages=turns, system="s"), "openai_chat")
    assert [message.role for message in request.messages] == ["system", "user", "assistant", "user"]


def test_request_that_only_loads_stays_one() -> None:
    assert applied(Preset(system="s"), "ollama_chat", messages=[]).loads_only


def test_opaque_bodies_get_the_fields_alone() -> None:
    preset = Preset(set_params={"voice": "x"}, system="s", reasoning="low")
    body = preset.applied(b'{"model":"m","input":"hi"}', DIALECTS["openai_chat"].preset, is_opaque=True)
    assert msgspec.json.decode(body) == {"model": "m", "input": "hi", "voice": "x"}


def test_fields_that_route_a_request_are_rejected() -> None:
    with pytest.raises(ValueError, match="cannot have model"):
        Preset(set_params={"model": "x"})
