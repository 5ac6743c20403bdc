"""Masks of a vocabulary, and the state of a grammar between tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tokenizers import Tokenizer

from cortex.neuron.text.errors import GrammarRejected
from cortex.neuron.text.grammar.matcher import Matcher
from cortex.wire.requests import OutputFormat

from ..conftest import known_id, load_text, write_model
from .drawing import SCHEMA, allowed, draw, request


def test_masks_are_written_into_torch_tensors(matchers: Matcher, make_model: Any) -> None:
    grammar = make_model("chatml").grammar(request(output=OutputFormat(kind="json_object")))
    rows = torch.zeros((3, matchers.mask_words), dtype=torch.int32)
    state = matchers.compile(grammar)
    state.fill_mask(rows[1])
    expected = numpy.zeros(matchers.mask_words, dtype=numpy.int32)
    state.fill_mask(expected)
    assert (rows[1].numpy() == expected).all()
    assert not rows[0].any()
    assert not rows[2].any()
    with pytest.raises(ValueError, match="words"):
        state.fill_mask(expected[1:])


def test_finished_output_allows_only_end_tokens(matchers: Matcher, make_model: Any) -> None:
    model = make_model("chatml")
    state = matchers.compile(model.grammar(request(output=OutputFormat(kind="choice", choices=("a",)))))
    assert (state.is_finished, state.is_accepting) == (False, False)
    state.accept(known_id(model.tokenizer, "a"))
    assert state.is_accepting
    row = numpy.zeros(matchers.mask_words, dtype=numpy.int32)
    state.fill_mask(row)
    assert set(allowed(row)) == set(model.eos_ids)
    assert state.is_finished


def test_rejects_a_token_outside_the_mask(matchers: Matcher, make_model: Any) -> None:
    model = make_model("chatml")
    state = matchers.compile(model.grammar(request(output=OutputFormat(kind="json_object"))))
    with pytest.raises(GrammarRejected, match="does not fit"):
        state.accept(known_id(model.tokenizer, "a"))
    with pytest.raises(GrammarRejected, match="does not compile"):
        matchers.compile("start: nothing_here")


def test_rejects_a_vocabulary_larger_than_the_model(backend: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(GrammarRejected, match="belongs to the model"):
        Matcher(write_model(tmp_path, backend, "chatml"), 100).compile('start: "a"')


def test_end_tokens_outside_the_vocabulary_do_not_matter(backend: Tokenizer, tmp_path: Path) -> None:
    end = backend.token_to_id("<|im_end|>")
    path = write_model(tmp_path, backend, "chatml", generation_config={"eos_token_id": [end, 50_279]})
    state = Matcher(path, backend.get_vocab_size()).compile('start: "a"')
    state.accept(backend.get_vocab()["a"])
    assert state.is_finished


def test_demo_models_vocabulary_compiles_grammars(demo_model: Path) -> None:
    model = load_text(demo_model)
    matcher = Matcher(demo_model, model.vocab_size)
    grammar = model.grammar(request(output=OutputFormat(kind="json_schema", schema=SCHEMA)))
    assert json.loads(draw(matcher, model, grammar or "", seed=1))["city"]


def test_compiling_a_grammar_again_gives_an_independent_state(matchers: Matcher, backend: Tokenizer) -> None:
    grammar = 'start: "ab" | "ba"'
    vocabulary = backend.get_vocab()
    a, b = vocabulary["a"], vocabulary["b"]
    first, second = matchers.compile(grammar), matchers.compile(grammar)
    first.accept(a)
    second.accept(b)
    third = matchers.compile(grammar)
    row = numpy.zeros(matchers.mask_words, dtype=numpy.int32)
    third.fill_mask(row)
    assert {a, b} <= set(allowed(row))
    first.fill_mask(row)
    assert a not in allowed(row)
