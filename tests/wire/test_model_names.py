from __future__ import annotations

import pytest

from cortex.wire.model_names import plain_name, split_quant


@pytest.mark.parametrize(
    ("name", "plain", "split"),
    [
        ("qwen3", "qwen3", ("qwen3", None)),
        ("qwen3:4b", "qwen3:4b", ("qwen3:4b", None)),
        ("qwen3:latest", "qwen3", ("qwen3", None)),
        ("hf.co/a/b:Q4_K_M", "a/b:Q4_K_M", ("a/b", "Q4_K_M")),
        ("a/b:", "a/b:", ("a/b:", None)),
        ("a:b/c", "a:b/c", ("a:b/c", None)),
    ],
)
def test_names_in_the_spelling_of_ollama(name: str, plain: str, split: tuple[str, str | None]) -> None:
    assert plain_name(name) == plain
    assert split_quant(plain) == split
