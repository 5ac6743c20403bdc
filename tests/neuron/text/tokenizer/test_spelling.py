"""The bytes of every token, against the library's own decoding, for every shape of published tokenizers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers

from cortex.neuron.text.tokenizer.library import LibraryTokenizer, is_utf8
from cortex.neuron.text.tokenizer.tokenizer import Tokenizer as TextTokenizer

from ..conftest import local, write_model
from ..tokenizer_shapes import SHAPES, SPACE, WITH_BYTES, byte_level, gemma


@pytest.fixture(params=SHAPES, ids=lambda shape: shape.__name__)
def shape(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Tokenizer, TextTokenizer]:
    """The library's tokenizer, and ours from the file that it saves."""
    backend: Tokenizer = request.param()
    return backend, local(LibraryTokenizer.load(write_model(tmp_path, backend, None)))


def test_every_token_adds_the_text_that_the_library_decodes(shape: tuple[Tokenizer, TextTokenizer]) -> None:
    backend, tokenizer = shape
    first, last = _words(backend)
    decoded = {i: (_decoded(backend, [first, i, last]), tokenizer.decode([first, i, last])) for i in _all(backend)}
    assert not {
        backend.id_to_token(i): pair
        for i, pair in decoded.items()
        if "\ufffd" not in pair[0] and pair[0].strip() != pair[1].strip()
    }


def test_sequences_of_tokens_decode_as_the_library_decodes_them(shape: tuple[Tokenizer, TextTokenizer]) -> None:
    backend, tokenizer = shape
    first, last = _words(backend)
    whole = [i for i in _all(backend) if is_utf8(tokenizer.token_bytes(i))]
    drawn = random.Random(7)
    for _ in range(50):
        ids = [first, *drawn.choices(whole, k=12), last]
        assert tokenizer.decode(ids).strip() == _decoded(backend, ids).strip(), ids


@pytest.mark.parametrize("make", WITH_BYTES)
def test_bytes_of_characters_are_spelled_as_bytes(make: Callable[[], Tokenizer]) -> None:
    backend, text = make(), "\u00ff😀\x00"
    tokenizer = local(LibraryTokenizer(backend, {}, ()))
    ids = [backend.get_vocab()[name] for name in _byte_names(backend, text.encode())]
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert _decoded(backend, ids) == text


def test_letters_of_an_added_token_are_not_taken_for_bytes() -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken("größe", normalized=False)])
    tokenizer = local(LibraryTokenizer(backend, {}, ()))
    assert tokenizer.decode(tokenizer.encode("hello größe")) == "hello größe"


def test_bytes_that_are_listed_as_added_tokens_are_bytes() -> None:
    backend, text = gemma(), "ü"
    backend.add_tokens([AddedToken(name, normalized=False) for name in _byte_names(backend, text.encode())])
    tokenizer = local(LibraryTokenizer(backend, {}, ()))
    ids = [backend.get_vocab()[name] for name in _byte_names(backend, text.encode())]
    assert tokenizer.decode(ids) == _decoded(backend, ids) == text


def test_tokens_that_are_stripped_from_both_ends_may_consist_of_spaces() -> None:
    backend = gemma()
    backend.add_tokens(["  b   "])
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Strip(" ", 1, 2)])
    tokenizer = local(LibraryTokenizer(backend, {}, ()))
    ids = [backend.get_vocab()[token] for token in (SPACE, SPACE * 2, SPACE * 5, "hello", f"{SPACE}hello", "  b   ")]
    assert [tokenizer.decode([each]) for each in ids] == ["", "", "  ", "hello", "hello", " b "]
    assert _decoded(backend, ids[2:]) == tokenizer.decode(ids[2:])


def test_runs_of_spaces_are_spaces_although_they_are_added_tokens(tmp_path: Path) -> None:
    tokenizer = local(LibraryTokenizer.load(write_model(tmp_path, gemma(), None)))
    for count in range(2, 32):
        run = tokenizer.whole_id(SPACE * count)
        assert run is not None
        assert tokenizer.token_bytes(run) == b" " * count


def test_text_is_encoded_as_the_library_encodes_it(shape: tuple[Tokenizer, TextTokenizer]) -> None:
    backend, tokenizer = shape
    for text in ("hello world", "a  hello   world.<s> hello<mask>a", "<think>你好</think> größe ñ\n\n", ""):
        expected = backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == expected
        assert list(tokenizer.encode_segmented(text).ids) == expected


def _all(backend: Tokenizer) -> Iterable[int]:
    return range(backend.get_vocab_size(with_added_tokens=True))


def _words(backend: Tokenizer) -> tuple[int, int]:
    """Tokens for the ends of a text, where the library drops spaces."""
    return (
        next(i for i in map(backend.token_to_id, ("hello", "h")) if i is not None),
        next(i for i in map(backend.token_to_id, ("world", "w")) if i is not None),
    )


def _decoded(backend: Tokenizer, ids: list[int]) -> str:
    return str(backend.decode(ids, skip_special_tokens=False))


def _byte_names(backend: Tokenizer, content: bytes) -> list[str]:
    if backend.token_to_id("<0x00>") is not None:
        return [f"<0x{byte:02X}>" for byte in content]
    [(names, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(content.decode())
    return list(names)
