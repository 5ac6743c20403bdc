"""Which prompts are taken, and where a request ends within the tokens of one step."""

from __future__ import annotations

import pytest

from cortex.neuron.engine.active_request import ActiveRequest, packed_tokens
from cortex.neuron.engine.errors import RequestError
from cortex.neuron.engine.request import EngineRequest, FinishReason
from cortex.neuron.engine.scheduling.sequence import Sequence

STOP = 9


@pytest.mark.parametrize(
    ("num_drawn", "tokens", "kept", "finish"),
    [
        (0, (), (), None),  # a chunk in the middle of the prompt
        (0, (1,), (1,), None),
        (0, (1, 2, 3), (1, 2, 3), None),
        (2, (1, STOP, 3), (1, STOP), "stop"),
        (0, (1, STOP, 3), (1, STOP, 3), None),  # below `min_tokens`
        (0, (1, STOP, STOP, 3), (1, STOP, STOP), "stop"),
        (4, (1, 2, 3), (1, 2), "length"),
        (4, (1, STOP, 3), (1, STOP), "stop"),
        (5, (1,), (1,), "length"),
    ],
)
def test_tokens_after_the_last_one_of_a_sequence_are_dropped(
    num_drawn: int, tokens: tuple[int, ...], kept: tuple[int, ...], finish: FinishReason | None
) -> None:
    request = EngineRequest("r", (1, 2, 3), max_tokens=6, stop_token_ids=(STOP,), min_tokens=2)
    known = [*request.prompt, *([0] * num_drawn)]
    assert ActiveRequest(request, known, Sequence(request, known)).until_end(tokens) == (kept, finish)


@pytest.mark.parametrize("tokens", [(), (0,), (9, 0, 5)])
def test_token_ids_of_the_vocabulary_are_packed(tokens: tuple[int, ...]) -> None:
    assert tuple(packed_tokens("prompt", tokens, 10)) == tokens


@pytest.mark.parametrize("tokens", [(10,), (3, -1), (2**32,), (2**32 + 3, 1)])
def test_token_ids_outside_the_vocabulary_are_an_error(tokens: tuple[int, ...]) -> None:
    with pytest.raises(RequestError, match="the prompt has token ids outside the model's vocabulary of 10"):
        packed_tokens("prompt", tokens, 10)
