"""A tokenizer that takes long to build."""

from __future__ import annotations

import string
from typing import Any

from tokenizers import pre_tokenizers

VOCABULARY = 150_000


def large_tokenizer() -> dict[str, Any]:
    """`tokenizer.json` of a vocabulary as large as today's: every short word, merged letter by letter."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    words = list(string.ascii_lowercase)
    for word in words:  # which grows meanwhile
        for letter in string.ascii_lowercase:
            vocabulary[word + letter] = len(vocabulary)
            merges.append((word, letter))
            words.append(word + letter)
        if len(vocabulary) >= VOCABULARY:
            break
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    }
