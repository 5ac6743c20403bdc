"""The tokens that end a response, from every kind of file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from cortex.neuron.text.tokenizer.gguf_vocabulary import end_ids
from cortex.neuron.text.tokenizer.library import LibraryTokenizer

from ..conftest import local, write_model


def test_end_tokens_of_a_gguf_are_the_ones_it_names_and_those_of_its_vocabulary(gguf_metadata: dict[str, Any]) -> None:
    end, turn = gguf_metadata["tokenizer.ggml.eos_token_id"], 7
    unnamed = [gguf_metadata["tokenizer.ggml.tokens"].index(token) for token in ("<|endoftext|>", "<|eot_id|>")]
    tokenizer = local(LibraryTokenizer.from_gguf({**gguf_metadata, "tokenizer.ggml.eot_token_id": turn}))
    assert tokenizer.eos_ids == (end, turn, *unnamed)


@pytest.mark.parametrize(
    ("family", "named", "whole", "expected"),
    [
        ("llama", "<|end_of_text|>", ("<|eot_id|>", "<|eom_id|>"), ("<|end_of_text|>", "<|eot_id|>", "<|eom_id|>")),
        ("qwen3", "<|im_end|>", ("<|endoftext|>",), ("<|im_end|>", "<|endoftext|>")),
        ("gemma3", "<eos>", ("<end_of_turn>",), ("<eos>", "<end_of_turn>")),
        ("phi3", "<|endoftext|>", ("<|end|>", "<|user|>"), ("<|endoftext|>", "<|end|>")),
        ("gpt-oss", "<|return|>", ("<|end|>", "<|start|>"), ("<|return|>",)),
        ("command-r", "<EOS_TOKEN>", ("<|END_OF_TURN_TOKEN|>",), ("<EOS_TOKEN>", "<|END_OF_TURN_TOKEN|>")),
        ("exaone", "<|endoftext|>", ("[|endofturn|]",), ("<|endoftext|>", "[|endofturn|]")),
    ],
)
def test_end_tokens_of_a_familys_gguf(family: str, named: str, whole: Sequence[str], expected: Sequence[str]) -> None:
    """Some converters write the id of only one of them."""
    tokens = ["a", named, *whole, "<|im_end|>" if family == "gemma3" else "b"]
    kinds = [1, *[3] * (1 + len(whole)), 1]  # a token of the same spelling that is ordinary text ends nothing
    metadata = {"tokens": tokens, "token_type": kinds, "eos_token_id": 1, "model": "gpt2"}
    ids = end_ids({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    assert [tokens[i] for i in ids] == list(expected)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": [5, 6]}, "config": {"eos_token_id": 9}}, (5, 6, "<|im_end|>")),
        ({"generation_config": {}, "config": {"eos_token_id": 9}}, (9, "<|im_end|>")),
        ({"generation_config": {}, "config": {"text_config": {"eos_token_id": 8}}}, (8, "<|im_end|>")),
        ({"generation_config": {}}, ("<|im_end|>",)),
        ({"generation_config": {"eos_token_id": 5}, "tokenizer_config": {}}, (5,)),
    ],
)
def test_end_tokens_come_from_the_models_files_in_order(
    backend: Tokenizer, tmp_path: Path, files: dict[str, Any], expected: tuple[int | str, ...]
) -> None:
    tokenizer = local(LibraryTokenizer.load(write_model(tmp_path, backend, "chatml", **files)))
    assert tokenizer.eos_ids == tuple(backend.token_to_id(i) if isinstance(i, str) else i for i in expected)
