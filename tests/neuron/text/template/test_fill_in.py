from __future__ import annotations

from typing import Any

import pytest

from cortex.neuron.text.template.fill_in import fill_in_prompt, markers
from cortex.wire.errors import UnsupportedModality


class _Vocabulary:
    """The part of a tokenizer that knows its control tokens."""

    def __init__(self, *tokens: str) -> None:
        self._ids = {token: index for index, token in enumerate(tokens)}

    def whole_id(self, text: str) -> int | None:
        return self._ids.get(text)


def test_uses_the_tokens_of_the_vocabulary() -> None:
    deepseek: Any = _Vocabulary("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")
    assert fill_in_prompt("a", "b", deepseek) == "<｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>"


def test_other_files_come_first_with_the_tokens_for_repositories() -> None:
    files = (("a.py", "x = 1\n"), ("b.py", "y = 2\n"))
    qwen = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    expected = "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>m"
    with_files: Any = _Vocabulary(*qwen, "<|repo_name|>", "<|file_sep|>")
    assert fill_in_prompt("a", "b", with_files, "m", files) == (
        f"<|repo_name|>myproject\n<|file_sep|>a.py\nx = 1\n<|file_sep|>b.py\ny = 2\n<|file_sep|>filename\n{expected}"
    )
    without: Any = _Vocabulary(*qwen)
    assert fill_in_prompt("a", "b", without, "m", files) == f"x = 1\n\ny = 2\n\n{expected}"
    assert fill_in_prompt("a", "b", with_files, "m") == expected


def test_model_without_the_tokens_cannot_fill_in() -> None:
    incomplete: Any = _Vocabulary("<fim_prefix>", "<fim_suffix>")
    assert markers(incomplete) is None
    with pytest.raises(UnsupportedModality, match="no tokens for filling in"):
        fill_in_prompt("a", "b", incomplete)
