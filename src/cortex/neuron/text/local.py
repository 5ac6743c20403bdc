"""Reads a model's text files with the tokenizer library in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cortex.neuron.text import defaults
from cortex.neuron.text.files import gguf_file, picture_spec, read_json
from cortex.neuron.text.template import template_source
from cortex.neuron.text.template.template_source import TemplateSources
from cortex.neuron.text.text_files import TextFiles
from cortex.neuron.text.tokenizer.encoder import EncodedTexts, Segmented, TextsToEncode
from cortex.neuron.text.tokenizer.library import LibraryTokenizer
from cortex.neuron.text.tokenizer.segments import SegmentEncoder
from cortex.neuron.weights.gguf.metadata import read_metadata


class LocalEncoder:
    """A `TextEncoder` that tokenises in this process."""

    def __init__(self, tokenizer: LibraryTokenizer) -> None:
        self._tokenizer = tokenizer
        self._segments = SegmentEncoder(tokenizer)
        self._num_tokenised = 0

    @property
    def num_tokenised(self) -> int:
        return self._num_tokenised + self._segments.num_tokenised

    def encode(self, text: str) -> list[int]:
        self._num_tokenised += len(text)
        return self._tokenizer.encode(text)

    def encode_document(self, text: str) -> list[int]:
        self._num_tokenised += len(text)
        return self._tokenizer.encode_document(text)

    def encode_texts(self, texts: TextsToEncode) -> EncodedTexts:
        return self._tokenizer.encode_texts(texts)

    def encode_segmented(self, text: str, literal_at: Sequence[int] = (), tenant: bytes = b"") -> Segmented:
        return self._segments.encode(text, literal_at, tenant)


def read_text(path: Path, chat_template: str | None = None) -> tuple[TextFiles, LocalEncoder]:
    """Reads a model directory or a .gguf file, with `chat_template` in place of its own. Raises TextModelError, or
    CheckpointError for a bad GGUF header."""
    files, encoder = _text_of(path)
    return (files if chat_template is None else _with_template(files, encoder, chat_template)), encoder


def _with_template(files: TextFiles, encoder: LocalEncoder, chat_template: str) -> TextFiles:
    """A given template may be written for several models, so it gets the token that begins a prompt of this one."""
    named = files.vocabulary.named_tokens
    begin = named.get("bos_token", "")
    begins = bool(begin) and encoder.encode_document("")[:1] == encoder.encode(begin)
    vocabulary = replace(files.vocabulary, named_tokens={**named, "document_start": begin if begins else ""})
    return replace(files, vocabulary=vocabulary, templates=TemplateSources(chat_template))


def _text_of(path: Path) -> tuple[TextFiles, LocalEncoder]:
    gguf = gguf_file(path)
    if gguf is not None:
        files, encoder = text_of_gguf(read_metadata(gguf).metadata)
        return replace(files, pictures=picture_spec(gguf)), encoder
    tokenizer = LibraryTokenizer.load(path)
    files = TextFiles(
        tokenizer.vocabulary,
        template_source.from_directory(path),
        defaults.from_generation_config(read_json(path / "generation_config.json")),
        picture_spec(path),
    )
    return files, LocalEncoder(tokenizer)


def text_of_gguf(metadata: Mapping[str, Any]) -> tuple[TextFiles, LocalEncoder]:
    """Reads a GGUF file's metadata; raises TextModelError."""
    tokenizer = LibraryTokenizer.from_gguf(metadata)
    files = TextFiles(tokenizer.vocabulary, template_source.from_gguf(metadata), defaults.from_gguf(metadata))
    return files, LocalEncoder(tokenizer)
