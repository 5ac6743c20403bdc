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


def test_model_without_the_tokens_cannot_fill_in() -> None:
    incomplete: Any = _Vocabulary("<fim_prefix>", "<fim_suffix>")
    assert markers(incomplete) is None
    with pytest.raises(UnsupportedModality, match="no tokens for filling in"):
        fill_in_prompt("a", "b", incomplete)
