"""Which prompts are taken."""

from __future__ import annotations

import pytest

from cortex.neuron.engine.errors import RequestError
from cortex.neuron.engine.scheduling.sequence import packed_tokens


@pytest.mark.parametrize("tokens", [(), (0,), (9, 0, 5)])
def test_token_ids_of_the_vocabulary_are_packed(tokens: tuple[int, ...]) -> None:
    assert tuple(packed_tokens("prompt", tokens, 10)) == tokens


@pytest.mark.parametrize("tokens", [(10,), (3, -1), (2**32,), (2**32 + 3, 1)])
def test_token_ids_outside_the_vocabulary_are_an_error(tokens: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match="the prompt has token ids outside the model's vocabulary of 10"):
        packed_tokens("prompt", tokens, 10)
