"""Small tokenizers of every shape that models are published with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

SPACE = "\u2581"
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
WORDS = ("a", "hello", "world", "Zürich", "你好", "n't", "'s", ".", ",", "don't", "<0xZZ>", "<0x1>", "x" * 2000)
ADDED = (
    AddedToken("<s>", special=True, normalized=False),
    AddedToken("<mask>", special=True, normalized=False, lstrip=True),
    AddedToken("<end of turn>", special=True, normalized=False, rstrip=True),
    AddedToken(f"<tool{SPACE}call>", special=True, normalized=False),
    AddedToken("<think>", normalized=False),
    AddedToken("<Normalised Word>", normalized=True, single_word=True),
    AddedToken("größe ñ", normalized=False),
    AddedToken("\n\n", normalized=False),
    *(AddedToken(" " * count, normalized=False) for count in range(2, 5)),
)
RUNS = tuple(AddedToken(SPACE * count, normalized=False) for count in range(2, 32))
"""Gemma has a token for each of these runs of spaces, and lists them as added tokens."""


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "Ġhello", "Ġworld", "ĊĊ", "ä½", "ł漢"]
    tokenizer = Tokenizer(models.BPE(_ids(words), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_added(tokenizer)


def byte_level_in_a_sequence() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return tokenizer


def gemma() -> Tokenizer:
    words = ["<pad>", "<unk>", *BYTES, SPACE, *(run.content for run in RUNS), *WORDS, *(SPACE + word for word in WORDS)]
    tokenizer = Tokenizer(models.BPE(_ids(words), [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_tokens(list(RUNS))
    return _with_added(tokenizer)


def llama() -> Tokenizer:
    tokenizer = gemma()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def bytes_before_spaces() -> Tokenizer:
    tokenizer = gemma()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
    return tokenizer


def expression() -> Tokenizer:
    tokenizer = gemma()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(Regex(f"{SPACE}(?=.|$)"), " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def unigram() -> Tokenizer:
    words = ["<unk>", SPACE, *WORDS, *(SPACE + word for word in WORDS)]
    tokenizer = Tokenizer(models.Unigram([(word, -float(i)) for i, word in enumerate(words)], 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _with_added(tokenizer)


def unigram_without_decoder() -> Tokenizer:
    return _without_decoder(unigram())


def word_piece() -> Tokenizer:
    words = ["[UNK]", *WORDS, *(f"##{word}" for word in WORDS), "do", "not", "##"]
    tokenizer = Tokenizer(models.WordPiece(_ids(words), unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _with_added(tokenizer)


def word_piece_as_written() -> Tokenizer:
    tokenizer = word_piece()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return tokenizer


def word_piece_without_decoder() -> Tokenizer:
    return _without_decoder(word_piece())


def word_level() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(_ids(["[UNK]", *WORDS]), unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return _with_added(tokenizer)


def fused_words() -> Tokenizer:
    tokenizer = word_level()
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def suffixes() -> Tokenizer:
    words = ["<unk>", *WORDS, *(f"{word}</w>" for word in WORDS)]
    tokenizer = Tokenizer(models.BPE(_ids(words), [], unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder()
    return _with_added(tokenizer)


WITH_BYTES: tuple[Callable[[], Tokenizer], ...] = (
    *(byte_level, byte_level_in_a_sequence, gemma, llama, bytes_before_spaces, expression),
)
SHAPES: tuple[Callable[[], Tokenizer], ...] = (
    *WITH_BYTES,
    *(unigram, unigram_without_decoder, word_piece, word_piece_as_written, word_piece_without_decoder),
    *(word_level, fused_words, suffixes),
)


def _with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([token for token in ADDED if token.special])
    tokenizer.add_tokens([token for token in ADDED if not token.special])
    return tokenizer


def _ids(words: Iterable[str]) -> dict[str, int]:
    return {word: number for number, word in enumerate(dict.fromkeys(words))}


def _without_decoder(tokenizer: Tokenizer) -> Tokenizer:
    described: dict[str, Any] = json.loads(tokenizer.to_str())
    return Tokenizer.from_str(json.dumps({**described, "decoder": None}))
