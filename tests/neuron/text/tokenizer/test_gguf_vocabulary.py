"""Vocabularies of GGUF files that are unusual, or too large."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import models

from cortex.neuron.text.tokenizer import gguf_vocabulary
from cortex.neuron.text.tokenizer.library import LibraryTokenizer


def test_vocabulary_that_memory_is_too_small_for_is_not_reported_as_damaged(
    gguf_metadata: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> models.BPE:
        raise MemoryError

    monkeypatch.setattr(models, "BPE", full)
    with pytest.raises(MemoryError):
        gguf_vocabulary.build(gguf_metadata)


@pytest.mark.parametrize("last", [(3, 1), (1, 3)])
def test_last_id_counts_where_a_word_and_a_control_token_are_spelled_alike_and_ids_have_gaps(
    gguf_metadata: dict[str, Any], last: tuple[int, int]
) -> None:
    tokens, kinds = gguf_metadata["tokenizer.ggml.tokens"], gguf_metadata["tokenizer.ggml.token_type"]
    alike = [*tokens, "<pad>", "<pad>", "words", "words"]  # the second padding token has no id
    metadata = {"tokenizer.ggml.tokens": alike, "tokenizer.ggml.token_type": [*kinds, 3, 3, *last]}
    tokenizer = LibraryTokenizer.from_gguf({**gguf_metadata, **metadata})
    assert tokenizer.vocab_size == len(alike)
    assert tokenizer.vocabulary.token_bytes(len(alike) - 1) == b"words"
