"""Masks of a vocabulary, and the state of a grammar between tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llguidance
import numpy
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cortex.neuron.text.errors import GrammarRejected, GrammarUnspellable
from cortex.neuron.text.grammar.matcher import Matcher
from cortex.neuron.text.grammar.trial import GrammarTrial
from cortex.neuron.text.tokenizer.library import LibraryTokenizer
from cortex.wire.requests import OutputFormat

from ..conftest import known_id, load_text, local, write_model
from ..tokenizer_shapes import SHAPES, llama, unigram_without_decoder, word_level, word_piece_without_decoder
from .drawing import PADDED_VOCABULARY, SCHEMA, allowed, draw, request


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


def test_grammar_is_compiled_again_for_another_tenant(matchers: Matcher, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_grammar = llguidance.LLMatcher

    def counted(vocabulary: Any, grammar: str, **options: Any) -> Any:
        compiled.append(grammar)
        return compile_grammar(vocabulary, grammar, **options)

    monkeypatch.setattr(llguidance, "LLMatcher", counted)
    grammar = 'start: "the schema of one tenant"'
    for tenant in (b"one", b"one", b"two", b"", b"two", b"one", b""):
        matchers.compile(grammar, tenant)
    assert compiled == [grammar] * 3


@pytest.mark.parametrize("is_word_first", [True, False])
def test_word_and_control_token_that_are_spelled_alike_are_distinguished(
    gguf_metadata: dict[str, Any], monkeypatch: pytest.MonkeyPatch, is_word_first: bool
) -> None:
    tokens, kinds = gguf_metadata["tokenizer.ggml.tokens"], gguf_metadata["tokenizer.ggml.token_type"]
    first = next(i for i, token in enumerate(tokens) if token.isalpha() and token.isascii() and len(token) > 2)
    second, end = len(tokens), len(tokens) + 1
    word, control = (first, second) if is_word_first else (second, first)
    changed = {word: 1, control: 3, end: 3}
    alike = {
        "tokenizer.ggml.tokens": [*tokens, tokens[first], "</s>"],
        "tokenizer.ggml.token_type": [changed.get(i, kind) for i, kind in enumerate([*kinds, 0, 0])],
        "tokenizer.ggml.eos_token_id": end,
    }
    matcher = _matcher(LibraryTokenizer.from_gguf({**gguf_metadata, **alike}), monkeypatch)
    assert word in _allowed(matcher, "start: /[a-z]+/")
    assert control not in _allowed(matcher, "start: /[a-z]+/")
    state = matcher.compile(f'start: <[{control}]> "{tokens[first]}"')
    for token in (control, word):
        state.accept(token)
    assert state.is_finished
    state.accept(end)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_ids_without_a_token_are_not_allowed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if kind == "bytes" else [f"<0x{i:02X}>" for i in range(256)]
    ids = {token: number for number, token in enumerate([*alphabet, "ab"])} | {"</s>": 300}
    backend = Tokenizer(models.BPE(vocab=ids, merges=[], byte_fallback=kind != "bytes"))
    backend.decoder = decoders.ByteLevel() if kind == "bytes" else decoders.ByteFallback()
    backend.add_special_tokens([AddedToken("</s>", normalized=False, special=True)])
    matcher = _matcher(LibraryTokenizer(backend, {}, (300,)), monkeypatch)
    assert {ids["ab"], 300} == {token for token in _allowed(matcher, r"start: /(.|\n)*/") if token > 255}


@pytest.mark.parametrize("shape", SHAPES)
def test_output_of_any_tokenizer_is_the_text_of_its_grammar(
    shape: Callable[[], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = shape()
    backend.add_special_tokens([AddedToken("<end>", normalized=False, special=True)])
    end = backend.get_vocab()["<end>"]
    library = LibraryTokenizer(backend, {}, (end,))
    matcher, spelled = _matcher(library, monkeypatch), library.vocabulary.token_bytes
    output, state = b"", matcher.compile("start: / ?hello ?world ?/")
    row = numpy.zeros(matcher.mask_words, dtype=numpy.int32)
    while not state.is_finished:
        state.fill_mask(row)
        token = allowed(row)[0]
        state.accept(token)
        output += spelled(token) if token != end else b""
    assert output.split() in ([b"hello", b"world"], [b"helloworld"])


@pytest.mark.parametrize("shape", [unigram_without_decoder, word_level, word_piece_without_decoder])
def test_format_that_begins_with_what_no_token_spells_is_unspellable(
    shape: Callable[[], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token of these begins with a space, or cannot begin a word."""
    backend = shape()
    backend.add_special_tokens([AddedToken("<end>", normalized=False, special=True)])
    matcher = _matcher(LibraryTokenizer(backend, {}, (backend.get_vocab()["<end>"],)), monkeypatch)
    state = matcher.compile(json.dumps({"grammars": [{"json_schema": SCHEMA}]}))
    row = numpy.zeros(matcher.mask_words, dtype=numpy.int32)
    state.fill_mask(row)
    with pytest.raises(GrammarUnspellable, match="vocabulary"):
        state.accept(allowed(row)[0])


def test_token_that_is_too_long_for_the_grammar_library_is_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: number for number, token in enumerate([*letters, "x" * 1023, "x" * 1024, "</s>"])}
    backend = Tokenizer(models.BPE(vocab=ids, merges=[]))
    backend.decoder = decoders.ByteLevel()
    matcher = _matcher(LibraryTokenizer(backend, {}, (ids["</s>"],)), monkeypatch)
    assert set(_allowed(matcher, "start: /x*/")) == {ids["x"], ids["x" * 1023], ids["</s>"]}


@pytest.mark.parametrize("num_bytes", [1023, 1024, 2000])
@pytest.mark.parametrize("special", [False, True])
def test_grammars_are_judged_and_followed_with_an_added_token_of_any_length(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int, special: bool
) -> None:
    backend = llama()
    backend.add_tokens([AddedToken("z" * num_bytes, normalized=False, special=special)])
    tokenizer: Any = LibraryTokenizer(backend, {}, (2,))
    grammar = json.dumps({"grammars": [{"json_schema": SCHEMA}]})
    assert GrammarTrial(local(tokenizer)).verdict(grammar).problem is None
    assert _matcher(tokenizer, monkeypatch).compile(grammar)


def test_id_outside_the_text_ends_an_output_where_the_model_names_no_end_token(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    matcher = _matcher(LibraryTokenizer(backend, {}, ()), monkeypatch)
    state = matcher.compile('start: "ab"')
    for token in (0, 1):
        state.accept(token)
    assert state.is_finished


def test_forced_text_continues_the_output_without_the_space_before_a_first_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = llama()
    library = LibraryTokenizer(backend, {}, (backend.get_vocab()["<s>"],))
    state = _matcher(library, monkeypatch).compile('start: "hello world"')
    forced = b"".join(map(library.vocabulary.token_bytes, state.forced_tokens()))
    assert forced
    assert b"hello world".startswith(forced)


def test_forced_text_of_a_control_token_is_not_that_token(matchers: Matcher, make_model: Any) -> None:
    tokenizer = make_model("chatml").tokenizer
    state = matchers.compile('start: "<|im_start|>"')
    forced = state.forced_tokens()
    assert tokenizer.decode(forced) == "<|im_start|>"
    assert tokenizer.whole_id("<|im_start|>") not in forced
    state.accept(forced[0])


def _matcher(tokenizer: LibraryTokenizer, monkeypatch: pytest.MonkeyPatch) -> Matcher:
    monkeypatch.setattr(LibraryTokenizer, "load", lambda _: tokenizer)
    return Matcher(Path("anywhere"), PADDED_VOCABULARY)


def _allowed(matcher: Matcher, grammar: str) -> list[int]:
    row = numpy.zeros(matcher.mask_words, dtype=numpy.int32)
    matcher.compile(grammar).fill_mask(row)
    return allowed(row)


@pytest.fixture(scope="module")
def large(demo_model: Path) -> tuple[Matcher, Matcher]:
    """Matchers of a large vocabulary with classes of tokens, and without."""
    return Matcher(demo_model, 49152), Matcher(demo_model, 49152, slices=())


@pytest.mark.parametrize(
    "grammar",
    [
        r"start: /[a-z ]{40,90}/",
        r"start: /([A-Z][a-z]{1,12} ){1,20}/",
        r"start: /\w{3,50}(\n\w{2,9})*/",
        'start: %json {"type": "array", "items": {"type": "string", "pattern": "^[a-z0-9_]{3,40}$"}}',
    ],
)
def test_classes_of_tokens_make_no_difference_to_masks(grammar: str, large: tuple[Matcher, Matcher]) -> None:
    matcher, without_classes = large
    state, plain = matcher.compile(grammar), without_classes.compile(grammar)
    row, expected = (numpy.zeros(matcher.mask_words, dtype=numpy.int32) for _ in range(2))
    for step in range(12):
        state.fill_mask(row)
        plain.fill_mask(expected)
        assert (row == expected).all()
        tokens = sorted(allowed(row))
        token = tokens[(step + 1) * 7919 % len(tokens)]
        state.accept(token)
        plain.accept(token)
        if state.is_finished:
            break
