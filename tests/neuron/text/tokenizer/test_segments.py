from __future__ import annotations

from functools import cache, cached_property
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Encoding, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from cortex.neuron.families.registry import SPLITS
from cortex.neuron.text.tokenizer.library import LibraryTokenizer
from cortex.neuron.text.tokenizer.segments import SegmentEncoder

from ..conftest import CONTROL, CORPUS, WHOLE

NAMES = sorted({way: name for name, way in SPLITS.items()}.values())
"""A name of each way to split."""
PIECES = st.one_of(st.text(), st.sampled_from([*CONTROL, *WHOLE, *CORPUS, "<|im_", "<think", CORPUS[0] * 4]))


@given(pieces=st.lists(PIECES, max_size=10), name=st.sampled_from(NAMES))
def test_segments_have_the_ids_of_the_whole_text(gguf_metadata: dict[str, Any], pieces: list[str], name: str) -> None:
    tokenizer, encoder = _encoder(gguf_metadata, name)
    text = "".join(pieces)
    expected = tokenizer.encode(text)
    for _ in range(2):  # new, and from the cache
        encoded = encoder.encode(text)
        assert list(encoded.ids) == expected
    for character, token in zip(encoded.cut_characters, encoded.cut_tokens, strict=True):
        assert tokenizer.encode(text[:character]) == expected[:token]
        assert tokenizer.encode(text[character:]) == expected[token:]


_ENCODERS: dict[str, tuple[LibraryTokenizer, SegmentEncoder]] = {}


def _encoder(metadata: dict[str, Any], name: str) -> tuple[LibraryTokenizer, SegmentEncoder]:
    if name not in _ENCODERS:
        tokenizer = LibraryTokenizer.from_gguf({**metadata, "tokenizer.ggml.pre": name})
        _ENCODERS[name] = (tokenizer, SegmentEncoder(tokenizer))
    return _ENCODERS[name]


@pytest.mark.parametrize("token", ["<whole-word>", " <with a space>"])
def test_text_with_tokens_that_are_not_found_by_their_text_is_encoded_by_the_library(
    backend: Tokenizer, token: str
) -> None:
    changed = Tokenizer.from_str(backend.to_str())
    changed.add_tokens([AddedToken("<greedy>", lstrip=True, rstrip=True, normalized=False)])
    changed.add_tokens([AddedToken(token, single_word=token[0] == "<", normalized=False)])
    tokenizer = LibraryTokenizer(changed, {}, ())
    text = f"one  <greedy> {token}  two<|im_end|>three"
    encoder = SegmentEncoder(tokenizer)
    encoded = encoder.encode(text)
    assert list(encoded.ids) == tokenizer.encode(text)
    assert encoded.cut_before(len(text)) == encoded.ids.index(changed.token_to_id("<|im_end|>")) + 1
    assert encoded.cut_before(0) == 0
    assert encoder.num_tokenised == len(text)


STRIPPING = {"<left>": (True, False), "<right>": (False, True), "<both>": (True, True)}
SPACES = [" ", "\n", "\t", "\r\n", "\v", "\f", "\x85", "\xa0", "\u2003", "\u3000", "\x1f", "\u200b", "\u180e"]
_STRIPPING: dict[str, LibraryTokenizer] = {}


@given(
    pieces=st.lists(st.one_of(st.text(max_size=9), st.sampled_from([*STRIPPING, *CONTROL[:2], *SPACES])), max_size=12),
    scheme=st.sampled_from(["bytes", "first", "prepended"]),
)
def test_segments_between_stripping_tokens_have_the_ids_of_the_whole_text(
    backend: Tokenizer, pieces: list[str], scheme: str
) -> None:
    if scheme not in _STRIPPING:
        changed = Tokenizer.from_str((backend if scheme == "bytes" else _SENTENCEPIECE[scheme]).to_str())
        for token, (left, right) in STRIPPING.items():
            changed.add_tokens([AddedToken(token, lstrip=left, rstrip=right, normalized=False)])
        _STRIPPING[scheme] = LibraryTokenizer(changed, {}, ())
    tokenizer, text = _STRIPPING[scheme], "".join(pieces)
    encoded = SegmentEncoder(tokenizer).encode(text)
    assert list(encoded.ids) == tokenizer.encode(text)
    for character, num_tokens in zip(encoded.cut_characters, encoded.cut_tokens, strict=True):
        assert tokenizer.encode(text[:character]) == list(encoded.ids[:num_tokens])


class CountingTokenizer(LibraryTokenizer):
    """Notes every text that it encodes."""

    @cached_property
    def encoded(self) -> list[str]:
        return []

    def encode(self, text: str) -> list[int]:
        self.encoded.append(text)
        return super().encode(text)

    def encoding(self, text: str) -> Encoding:
        self.encoded.append(text)
        return super().encoding(text)


def test_evicts_the_least_recently_used_segments_beyond_the_limit(backend: Tokenizer) -> None:
    tokenizer = CountingTokenizer(backend, {}, ())
    encoder = SegmentEncoder(tokenizer, max_cached_characters=3000)
    texts = [f"{i} " * 500 for i in range(6)]
    expected = [LibraryTokenizer(backend, {}, ()).encode(text) for text in texts]
    for text in (*texts, *texts[:2:-1]):  # the last three come from the cache
        assert list(encoder.encode(text).ids) == expected[texts.index(text)]
    assert tokenizer.encoded == texts
    encoder.encode(texts[0])  # takes the place of the last one
    encoder.encode(texts[3])
    encoder.encode(texts[5])
    assert tokenizer.encoded == [*texts, texts[0], texts[5]]


def test_segments_of_another_tenant_are_tokenised_as_if_they_were_new(backend: Tokenizer) -> None:
    tokenizer = CountingTokenizer(backend, {}, ())
    encoder, text = SegmentEncoder(tokenizer), "what one tenant says " * 20
    for tenant in (b"", b"one", b"two", b"one", b""):
        assert list(encoder.encode(text, tenant=tenant).ids) == LibraryTokenizer(backend, {}, ()).encode(text)
    assert tokenizer.encoded == [text] * 3


def test_literal_characters_count_towards_the_limit() -> None:
    tokenizer = CountingTokenizer(_SENTENCEPIECE["first"], {}, ())
    encoder = SegmentEncoder(tokenizer, max_cached_characters=1000)
    texts = [f"{number}{'<|im_end|>' * 40}" for number in range(5)]  # two of them would fit without their positions
    literal_at = [1 + 10 * index for index in range(40)]
    for text in texts:
        encoder.encode(text, literal_at)
    tokenizer.encoded.clear()
    encoder.encode(texts[4], literal_at)
    assert tokenizer.encoded == []
    encoder.encode(texts[3], literal_at)
    assert len(tokenizer.encoded) == 1


@given(pieces=st.lists(st.sampled_from([*CONTROL, *WHOLE, "a", "<", "think", "<|im_"]), max_size=30))
def test_windows_do_not_split_whole_tokens(gguf_metadata: dict[str, Any], pieces: list[str]) -> None:
    tokenizer, _ = _encoder(gguf_metadata, "gpt-2")
    text = "".join(pieces)
    for window in (1, 2, 7, 30):
        encoder = SegmentEncoder(tokenizer, window_characters=window)
        assert list(encoder.encode(text).ids) == tokenizer.encode(text)


def _sentencepiece(scheme: str) -> Tokenizer:
    """BPE over `▁` for spaces, which begins texts, or all parts of them, with one: as Llama 2, Mistral and Gemma."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    if scheme == "prepended":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif scheme == "replaced":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, special_tokens=["<unk>"])
    tokenizer.train_from_iterator([text.replace(" ", "▁") for text in CORPUS], trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL])
    return tokenizer


_SENTENCEPIECE = {scheme: _sentencepiece(scheme) for scheme in ("first", "always", "never", "prepended", "replaced")}


@given(pieces=st.lists(PIECES, max_size=10), scheme=st.sampled_from(sorted(_SENTENCEPIECE)))
def test_segments_of_sentencepiece_have_the_ids_of_the_whole_text(pieces: list[str], scheme: str) -> None:
    tokenizer = LibraryTokenizer(_SENTENCEPIECE[scheme], {}, ())
    encoder = SegmentEncoder(tokenizer)
    text = "".join(pieces)
    for _ in range(2):
        encoded = encoder.encode(text)
        assert list(encoded.ids) == tokenizer.encode(text)
    for character, token in zip(encoded.cut_characters, encoded.cut_tokens, strict=True):
        assert tokenizer.encode(text[:character]) == list(encoded.ids[:token])


@given(pieces=st.lists(st.tuples(st.booleans(), PIECES), max_size=10), scheme=st.sampled_from(sorted(_SENTENCEPIECE)))
def test_sentencepiece_takes_no_literal_text_for_a_token(pieces: list[tuple[bool, str]], scheme: str) -> None:
    tokenizer = LibraryTokenizer(_SENTENCEPIECE[scheme], {}, ())
    whole = {tokenizer.backend.token_to_id(token) for token in CONTROL}
    text, literal_at, meant = "", list[int](), list[int | None]()
    for is_literal, piece in pieces:
        if piece in CONTROL and is_literal:
            literal_at.append(len(text))
        elif piece in CONTROL:
            meant.append(tokenizer.backend.token_to_id(piece))
        text += piece
    encoder = SegmentEncoder(tokenizer)
    for _ in range(2):  # new, and from the cache
        ids = encoder.encode(text, literal_at).ids
        assert [token for token in ids if token in whole] == meant
    assert ids == _without_segments(scheme).encode(text, literal_at).ids


@cache
def _without_segments(scheme: str) -> SegmentEncoder:
    """Encodes texts as a whole, because of a token that is not found by its text."""
    changed = Tokenizer.from_str(_SENTENCEPIECE[scheme].to_str())
    changed.add_tokens([AddedToken("<whole-word>", single_word=True, normalized=False)])
    return SegmentEncoder(LibraryTokenizer(changed, {}, ()))


@pytest.mark.parametrize("is_literal", [False, True])
@pytest.mark.parametrize("scheme", ["bytes", "first", "prepended"])
def test_turn_of_a_growing_conversation_encodes_only_what_is_new(
    backend: Tokenizer, scheme: str, is_literal: bool
) -> None:
    """Also where the client mentions a control token, which is literal then."""
    library = backend if scheme == "bytes" else _SENTENCEPIECE[scheme]
    begin, mentioned = "<|im_start|>user\n", "<|im_end|> is a token. " if is_literal else ""
    turns = [f"{begin}{mentioned}{number} {CORPUS[0] * 6}<|im_end|>\n" for number in range(5)]
    literal_at = [index * len(turns[0]) + len(begin) for index in range(5 * is_literal)]
    tokenizer = CountingTokenizer(library, {}, ())
    encoder = SegmentEncoder(tokenizer)
    encoder.encode("".join(turns[:4]), literal_at[:4])
    tokenizer.encoded.clear()
    before = encoder.num_tokenised
    encoded = encoder.encode("".join(turns), literal_at)
    assert encoded == SegmentEncoder(LibraryTokenizer(library, {}, ())).encode("".join(turns), literal_at)
    assert [text for text in tokenizer.encoded if CORPUS[0] in text and "4 " not in text[:60]] == []
    assert sum(map(len, tokenizer.encoded)) < 2 * len(turns[-1])
    assert len(CORPUS[0] * 6) < encoder.num_tokenised - before < 2 * len(turns[-1])


def test_finds_the_longest_of_thousands_of_tokens(backend: Tokenizer) -> None:
    changed = Tokenizer.from_str(backend.to_str())
    many = [f"<unused{number}>" for number in range(3000)] + ["<un", "<unused", "[[", "[[[", "[.]"]
    changed.add_tokens([AddedToken(token, normalized=False) for token in many])
    tokenizer = LibraryTokenizer(changed, {}, ())
    encoder = SegmentEncoder(tokenizer)
    for text in ("a<unused17>b<unused2999><unused3000>", "<unus<unused<un", "[[[[[.][[.]", "<<un>unused1>"):
        assert list(encoder.encode(text).ids) == tokenizer.encode(text)
        assert encoder.encode(text).cut_characters
