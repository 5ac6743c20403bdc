"""Mistral's own file of a tokenizer, with the vocabulary that other files have here."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from cortex.neuron.text.errors import TextFileMalformed
from cortex.neuron.text.files import token_search
from cortex.neuron.text.local import read_text
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.tokenizer.encoder import NoEncoder
from cortex.neuron.text.tokenizer.library import LibraryTokenizer
from cortex.neuron.text.tokenizer.tokenizer import Tokenizer as TextTokenizer
from cortex.wire.requests import GenerateRequest, Message, Text

from ..conftest import CORPUS

NUM_CONTROLS = 40
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
BYTES = [bytes([byte]) for byte in range(256)]
NEWER = [*("<unk>", "<s>", "</s>", "[INST]", "[/INST]"), *("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]", "[THINK]")]


def described(backend: Tokenizer) -> dict[str, Any]:
    """The trained vocabulary without its control tokens: ids are in the order of the merges."""
    trained = TextTokenizer(LibraryTokenizer(backend, {}, ()).vocabulary, NoEncoder())
    size = backend.get_vocab_size(with_added_tokens=False)
    return {
        **sized(size - 3),
        "vocab": vocabulary(*(trained.token_bytes(rank) for rank in range(size))),
    }


def vocabulary(*spellings: bytes) -> list[dict[str, Any]]:
    return [
        {"rank": rank, "token_bytes": base64.b64encode(spelling).decode()} for rank, spelling in enumerate(spellings)
    ]


def sized(num_tokens: int, pattern: str | None = GPT2) -> dict[str, Any]:
    """The config of a vocabulary of `num_tokens` after the control tokens."""
    return {
        "config": {
            **{"pattern": pattern, "version": "v7"},
            **{"default_vocab_size": NUM_CONTROLS + num_tokens, "default_num_special_tokens": NUM_CONTROLS},
        }
    }


def written(directory: Path, content: Any) -> Path:
    (directory / "tekken.json").write_text(json.dumps(content))
    (directory / "config.json").write_text(json.dumps({"model_type": "mistral3", "eos_token_id": 2}))
    return directory


@pytest.mark.parametrize("text", CORPUS, ids=range(len(CORPUS)))
def test_text_has_the_tokens_of_the_same_vocabulary_after_the_control_tokens(
    backend: Tokenizer, tmp_path: Path, text: str
) -> None:
    content = described(backend)
    content["config"]["default_vocab_size"] += 3
    tokenizer = LibraryTokenizer.load(written(tmp_path, content))
    expected = [NUM_CONTROLS + number for number in backend.encode(text, add_special_tokens=False).ids]
    assert tokenizer.encode(text) == expected
    assert tokenizer.encode_document(text) == [1, *expected]
    assert tokenizer.backend.decode(expected) == text
    assert tokenizer.eos_ids == (2,)


def test_vocabulary_ends_at_its_stated_size(backend: Tokenizer, tmp_path: Path) -> None:
    content = described(backend)
    tokenizer = LibraryTokenizer.load(written(tmp_path, content))
    assert tokenizer.vocab_size == content["config"]["default_vocab_size"]


def test_word_that_is_spelled_like_a_control_token_has_an_id_of_its_own(backend: Tokenizer, tmp_path: Path) -> None:
    content = described(backend)
    words = [base64.b64decode(each["token_bytes"]) for each in content["vocab"]]
    rank = next(rank for rank, word in enumerate(words) if word.isalpha() and len(word) > 2)
    listed = [*NEWER, words[rank].decode()]
    content["special_tokens"] = [{"rank": number, "token_str": token} for number, token in enumerate(listed)]
    tokenizer = LibraryTokenizer.load(written(tmp_path, content))
    assert tokenizer.encode(words[rank].decode()) == [len(NEWER)]
    vocabulary = tokenizer.vocabulary
    assert vocabulary.token_bytes(NUM_CONTROLS + rank) == words[rank]
    assert NUM_CONTROLS + rank not in {token.id for token in vocabulary.whole_tokens}
    assert tokenizer.vocab_size == content["config"]["default_vocab_size"]


def test_conversation_is_written_with_the_control_tokens_of_the_file(backend: Tokenizer, tmp_path: Path) -> None:
    tokens = [{"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(NEWER)]
    content = described(backend) | {"special_tokens": tokens}
    model = TextModel.of(*read_text(written(tmp_path, content)))
    messages = tuple(Message(role=role, parts=(Text(text=role),)) for role in ("system", "user"))
    rendered = model.render(GenerateRequest(model="m", messages=messages))
    assert rendered.text == "<s>[SYSTEM_PROMPT]system[/SYSTEM_PROMPT][INST]user[/INST]"
    assert [number for number in rendered.ids if number < NUM_CONTROLS] == [1, 5, 6, 3, 4]
    assert token_search(tmp_path)("[ARGS]")
    assert not token_search(tmp_path)("[MIDDLE]")


@pytest.mark.parametrize(
    "damage",
    [
        {"config": None},
        {"config": {"pattern": GPT2}},
        {"config": {"pattern": GPT2, "default_vocab_size": 1 << 40, "default_num_special_tokens": 1000}},
        {"config": {"pattern": GPT2, "default_vocab_size": 300, "default_num_special_tokens": 300}},
        {"vocab": None},
        {"vocab": vocabulary(b"a")},
        {"vocab": vocabulary(*BYTES)[1:], **sized(255)},
        {"vocab": [{"rank": 0, "token_bytes": "é"}], **sized(1)},
        {"vocab": vocabulary(*[b"a"] * 256), **sized(256)},
        {"vocab": vocabulary(*BYTES, b"a"), **sized(257)},
        {"vocab": vocabulary(*BYTES, b""), **sized(257)},
        {"vocab": vocabulary(*BYTES, b"a" * 1025), **sized(257)},
        {"vocab": vocabulary(*BYTES), **sized(257)},
        {"vocab": vocabulary(*BYTES), **sized(256, pattern=None)},
        {"vocab": vocabulary(*BYTES), **sized(256, pattern="(")},
        {"special_tokens": [1]},
        {"special_tokens": [{"rank": 0, "token_str": "<s>"}, {"rank": 1, "token_str": "<s>"}]},
        {"special_tokens": [{"rank": 0, "token_str": "<SPECIAL_7>"}]},
        {"special_tokens": [{"rank": 1, "token_str": "<s>"}, {"rank": 1, "token_str": "</s>"}]},
        {"special_tokens": [{"rank": 1, "token_str": None}]},
        {"special_tokens": [{"rank": 1, "token_str": ""}]},
    ],
)
def test_damaged_file_is_rejected_by_name(backend: Tokenizer, tmp_path: Path, damage: dict[str, Any]) -> None:
    with pytest.raises(TextFileMalformed, match=r"tekken\.json is not a tokenizer"):
        LibraryTokenizer.load(written(tmp_path, described(backend) | damage))


def test_vocabulary_of_all_bytes_is_whole(tmp_path: Path) -> None:
    tokenizer = LibraryTokenizer.load(written(tmp_path, {"vocab": vocabulary(*BYTES), **sized(256)}))
    assert tokenizer.encode("é") == [NUM_CONTROLS + byte for byte in "é".encode()]
