"""Where a sequence ends within the tokens of one step."""

from __future__ import annotations

import pytest

from cortex.neuron.engine.drawn_tokens import until_end
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
    sequence = Sequence.of(EngineRequest("r", (1, 2, 3), max_tokens=6, stop_token_ids=(STOP,), min_tokens=2))
    sequence.tokens += [0] * num_drawn
    assert until_end(sequence, tokens) == (kept, finish)
