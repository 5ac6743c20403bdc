from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from cortex.neuron.text.tokenizer import segments
from cortex.neuron.text.tokenizer.library import LibraryTokenizer
from cortex.neuron.text.tokenizer.segments import SegmentEncoder

from ..conftest import CONTROL, CORPUS, WHOLE

PIECES = st.one_of(st.text(), st.sampled_from([*CONTROL, *WHOLE, *CORPUS, "<|im_", "<think", CORPUS[0] * 4]))


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(PIECES, max_size=10), name=st.sampled_from(["gpt-2", "smollm", "llama-bpe", "qwen2", "qwen35"]))
def test_segments_have_the_ids_of_the_whole(gguf_metadata: dict[str, Any], pieces: list[str], name: str) -> None:
    tokenizer, encoder = _encoder(gguf_metadata, name)
    text = "".join(pieces)
    expected = tokenizer.encode(text)
    for _ in range(2):  # afresh, and from memory
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


def test_tokens_that_swallow_their_surroundings_are_left_to_the_library(backend: Tokenizer) -> None:
    changed = Tokenizer.from_str(backend.to_str())
    changed.add_tokens([AddedToken("<greedy>", lstrip=True, rstrip=True, normalized=False)])
    tokenizer = LibraryTokenizer(changed, {}, ())
    text = "one  <greedy>  two<|im_end|>three"
    encoded = SegmentEncoder(tokenizer).encode(text)
    assert list(encoded.ids) == tokenizer.encode(text)
    assert encoded.cut_before(len(text)) == encoded.ids.index(changed.token_to_id("<|im_end|>")) + 1
    assert encoded.cut_before(0) == 0


def test_memory_is_bounded_and_the_oldest_goes_first(backend: Tokenizer, monkeypatch: Any) -> None:
    monkeypatch.setattr(segments, "_MAX_REMEMBERED_CHARACTERS", 3000)
    tokenizer = LibraryTokenizer(backend, {}, ())
    encoder = SegmentEncoder(tokenizer)
    texts = [f"{i} " * 500 for i in range(6)]
    for text in texts:
        assert list(encoder.encode(text).ids) == tokenizer.encode(text)
    assert list(encoder._remembered) == texts[-3:]
    assert encoder._num_characters == 3000


@settings(max_examples=100, deadline=None)
@given(pieces=st.lists(st.sampled_from([*CONTROL, *WHOLE, "a", "<", "think", "<|im_"]), max_size=30))
def test_windows_cut_no_whole_token_in_two(gguf_metadata: dict[str, Any], monkeypatch: Any, pieces: list[str]) -> None:
    tokenizer, encoder = _encoder(gguf_metadata, "gpt-2")
    text = "".join(pieces)
    for window in (1, 2, 7, 30):
        monkeypatch.setattr(segments, "_WINDOW_CHARACTERS", window)
        assert list(encoder.encode(text).ids) == tokenizer.encode(text)
