"""Requests with a grammar, and output drawn at random from its masks."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
from tokenizers import Tokenizer

from cortex.neuron.text.grammar.matcher import Matcher
from cortex.neuron.text.model import TextModel
from cortex.wire.requests import GenerateRequest, Message, Text, Tool

from ..conftest import id_of, write_model

PADDED_VOCABULARY = 512
"""More logits than tokens, as models have."""
FAMILIES = ("llama3", "qwen3", "qwen_xml", "hermes")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Zürich"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = (
    Tool(name="get_weather", parameters=SCHEMA),
    Tool(name="set_flag", parameters={"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}),
)
SAID = (Message(role="user", parts=(Text(text="x"),)),)


@pytest.fixture(scope="module")
def matchers(backend: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Matcher:
    return Matcher(write_model(tmp_path_factory.mktemp("matcher"), backend, "qwen3"), PADDED_VOCABULARY)


def allowed(row: numpy.ndarray[Any, numpy.dtype[numpy.int32]]) -> list[int]:
    return [int(i) for i in numpy.flatnonzero(numpy.unpackbits(row.view(numpy.uint8), bitorder="little"))]


def draw(
    matcher: Matcher, model: TextModel, grammar: str, seed: int, max_tokens: int = 4000, tools: tuple[Tool, ...] = TOOLS
) -> str:
    """Sample uniformly from the mask, with a preference for tokens that end it."""
    generator = random.Random(seed)
    state = matcher.compile(grammar)
    row = numpy.zeros(matcher.mask_words, dtype=numpy.int32)
    ids: list[int] = []
    planned: list[int] = []
    closing = [id_of(model.tokenizer, token) for token in ('"', "}", "]", "</think>", "</tool_call>", *"<\n")]
    while len(ids) < max_tokens:
        state.fill_mask(row)
        choices = allowed(row)
        assert choices, "a mask must leave something to choose"
        assert max(choices) < model.vocab_size, "padding must never be chosen"
        if not planned and generator.random() < 0.05:
            planned = model.encode("\n</parameter>\n")  # random draws would never close a raw value
        ends = [i for i in choices if i in model.eos_ids or i in closing]
        token = generator.choice(ends if ends and generator.random() < 0.3 else choices)
        if planned:
            token = planned.pop(0) if planned[0] in choices else token
        state.accept(token)
        if token in model.eos_ids:
            assert state.is_finished
            return model.detokenizer(request(tools=tools)).push(ids)
        ids.append(token)
    pytest.fail(f"no end after {max_tokens} tokens: {model.decode(ids)[-300:]}")


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(model="m", messages=SAID, **fields)
