"""The sizes and inputs of the graphs of short prompts; `tests/neuron/kernels/test_prompt_graphs.py` computes them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.neuron.engine.execution.inputs import StepInputs
from cortex.neuron.engine.execution.prompt_graphs import (
    MAX_PART_STREAMS,
    MAX_PART_TOKENS,
    MAX_PROMPTS,
    PROMPT_SIZES,
    arrange,
    empty_input,
    num_tiles,
    parts_of,
    prompt_sizes,
)
from cortex.neuron.engine.scheduling.step_plan import (
    DRAW_ONE,
    LATEST_TOKEN,
    PromptScoring,
    RowInputs,
    RowOutputs,
    RowPlan,
    StateCut,
    StepPlan,
)
from cortex.neuron.kernels.batch import prefill_tiles


@pytest.mark.parametrize(
    ("max_tokens", "max_captured", "largest"), [(16_384, 2048, 2048), (16_384, 512, 512), (40, 2048, 48), (9, 2048, 16)]
)
def test_sizes_end_with_the_one_that_holds_every_step_that_can_be_captured(
    max_tokens: int, max_captured: int, largest: int
) -> None:
    assert prompt_sizes(max_tokens, max_captured) == tuple(size for size in PROMPT_SIZES if size <= largest)


def test_nothing_is_captured_where_messages_are_too_large() -> None:
    assert prompt_sizes(16_384, 12) == ()


@given(st.lists(st.integers(2, 600), min_size=1, max_size=MAX_PROMPTS), st.integers(0, 50))
def test_arranged_input_has_every_token_row_and_tile_and_the_rest_is_empty(counts: list[int], start: int) -> None:
    rows = tuple(
        RowPlan(row, start, RowInputs(count, (7,) * count), cut=StateCut(1, 40 + row) if row else None)
        for row, count in enumerate(counts)
    )
    pages = np.arange(1, 1 + 3 * 700, dtype=np.int32).reshape(3, 700)
    inputs = StepInputs.of(StepPlan(rows, 0, (), ()), [pages], 1)
    size = next(size for size in PROMPT_SIZES if size >= sum(counts))
    memory = empty_input(size, 1, 99)
    arrange(memory, size, inputs)
    by_token, by_row = memory[: 4 * size].reshape(4, size), memory[4 * size :]
    used = sum(counts)
    assert (by_token[0, :used] == 7).all()
    assert not by_token[:, used:].any()
    assert (by_token[1, :used] == inputs.positions).all()
    assert (by_token[3, :used] == inputs.slots[0]).all()
    num_rows = MAX_PROMPTS + 1
    assert by_row[:num_rows].tolist() == [*range(len(counts)), *[99] * (num_rows - len(counts))]
    assert by_row[num_rows : 2 * num_rows].tolist() == [
        *(start + count for count in counts),
        *[0] * (num_rows - len(counts)),
    ]
    offsets = by_row[2 * num_rows : 3 * num_rows + 1]
    assert np.diff(offsets).tolist() == [*counts, *[0] * (num_rows - len(counts))]
    cuts = by_row[-2 * num_tiles(size) - 2 * num_rows :][: 2 * num_rows].reshape(-1, 2).tolist()
    assert cuts[: len(counts)] == [[0, 0], *([1, 40 + row] for row in range(1, len(counts)))]
    assert not any(map(any, cuts[len(counts) :]))
    tiles = by_row[-2 * num_tiles(size) :].reshape(-1, 2).tolist()
    expected = prefill_tiles(counts).tolist()
    assert tiles[: len(expected)] == expected
    assert all(tile == [MAX_PROMPTS, 0] for tile in tiles[len(expected) :])


STREAM = RowPlan(0, 9, LATEST_TOKEN, DRAW_ONE, decodes=True)
PROMPT = RowPlan(1, 0, RowInputs(20, (1,) * 20), DRAW_ONE)
LONG = RowPlan(1, 0, RowInputs(MAX_PART_TOKENS - 19, (1,) * (MAX_PART_TOKENS - 19)))
CHECKING = RowPlan(2, 9, RowInputs(3, (1, 2, 3)), RowOutputs(draws=3), decodes=True)
SCORED = RowPlan(2, 0, RowInputs(3, (1, 2, 3)), RowOutputs(1, PromptScoring((2, 3))))


@pytest.mark.parametrize(
    ("streams", "prompts", "num_proposals", "has_parts"),
    [
        (1, [PROMPT], None, True),
        (MAX_PART_STREAMS, [PROMPT] * MAX_PROMPTS, None, True),
        (0, [PROMPT], None, False),
        (3, [], None, False),
        (MAX_PART_STREAMS + 1, [PROMPT], None, False),
        (1, [PROMPT] * (MAX_PROMPTS + 1), None, False),
        (1, [LONG], None, True),
        (1, [LONG, PROMPT], None, False),
        (1, [CHECKING], None, False),
        (1, [PROMPT, SCORED], None, False),
        (1, [PROMPT], 0, False),
    ],
)
def test_few_streams_and_short_prompts_are_computed_in_two_parts(
    streams: int, prompts: list[RowPlan], num_proposals: int | None, has_parts: bool
) -> None:
    plan = StepPlan((*[STREAM] * streams, *prompts), streams, (), (), num_proposals=num_proposals)
    parts = parts_of(plan)
    assert len(parts) == 1 + has_parts
    if has_parts:
        assert [part.num_singles for part in parts] == [streams, 0]
    else:
        assert parts == (plan,)
    assert tuple(row for part in parts for row in part.rows) == plan.rows
