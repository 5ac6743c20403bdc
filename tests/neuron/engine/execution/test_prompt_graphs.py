"""The sizes and inputs of the graphs of short prompts; `tests/neuron/kernels/test_prompt_graphs.py` computes them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.neuron.engine.execution.inputs import StepInputs
from cortex.neuron.engine.execution.prompt_graphs import (
    MAX_PROMPTS,
    PROMPT_SIZES,
    arrange,
    empty_input,
    mixed_sizes,
    num_tiles,
    prompt_sizes,
    stream_sizes,
)
from cortex.neuron.engine.scheduling.step_plan import (
    DRAW_ONE,
    LATEST_TOKEN,
    RowInputs,
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


def test_streams_and_prompts_fill_tiles_together() -> None:
    assert mixed_sizes(48)[:5] == (16, 64, 80, 144, 208)
    assert mixed_sizes(256)[:4] == (16, 64, 128, 256)
    for streams in (16, 32, 48, 64, 128, 256):
        assert list(mixed_sizes(streams)) == sorted(set(mixed_sizes(streams)))


def test_nothing_is_captured_where_messages_are_too_large() -> None:
    assert prompt_sizes(16_384, 12) == ()


@pytest.mark.parametrize(
    ("max_rows", "sizes"), [(1, (16,)), (16, (16,)), (33, (16, 32, 48, 64)), (256, (16, 32, 48, 64, 128, 256))]
)
def test_streams_of_a_step_find_a_size(max_rows: int, sizes: tuple[int, ...]) -> None:
    assert stream_sizes(max_rows) == sizes
    assert sizes[-1] >= min(max_rows, 256)


@given(st.lists(st.integers(2, 290), min_size=1, max_size=MAX_PROMPTS), st.integers(0, 9), st.sampled_from([16, 64]))
def test_streams_come_first_and_prompts_follow_their_padding(counts: list[int], singles: int, streams: int) -> None:
    prompts = [RowPlan(20 + row, 0, RowInputs(count, (7,) * count)) for row, count in enumerate(counts)]
    decodes = [RowPlan(row, 4 + row, LATEST_TOKEN, DRAW_ONE, decodes=True) for row in range(singles)]
    plan = StepPlan((*decodes, *prompts), singles, (), ())
    inputs = StepInputs.of(plan, [np.arange(1, 1 + 30 * 700, dtype=np.int32).reshape(30, 700)], 1)
    size = next(size for size in PROMPT_SIZES if size >= sum(counts))
    memory = empty_input(size, 1, 99, streams)
    arrange(memory, size, inputs, streams, singles)
    width, num_rows = streams + size, streams + MAX_PROMPTS + 1
    by_token, by_row = memory[: 4 * width].reshape(4, width), memory[4 * width :]
    assert by_token[1, :singles].tolist() == [4 + row for row in range(singles)]
    assert not by_token[:, singles:streams].any()
    assert (by_token[3, streams:][: sum(counts)] == inputs.slots[0, singles:]).all()
    assert by_row[:singles].tolist() == list(range(singles))
    assert (by_row[singles:streams] == 99).all()
    assert by_row[streams:][: len(counts)].tolist() == [20 + row for row in range(len(counts))]
    lengths = by_row[num_rows : 2 * num_rows]
    assert lengths[:streams].tolist() == [*(5 + row for row in range(singles)), *[1] * (streams - singles)]
    assert lengths[streams:].tolist() == [*counts, *[0] * (MAX_PROMPTS + 1 - len(counts))]
    assert np.diff(by_row[2 * num_rows :][: len(counts) + 1]).tolist() == counts


@given(st.lists(st.integers(2, 290), min_size=1, max_size=MAX_PROMPTS), st.integers(0, 50))
def test_arranged_input_has_every_token_row_and_tile_and_the_rest_is_empty(counts: list[int], start: int) -> None:
    rows = tuple(
        RowPlan(row, start, RowInputs(count, (7,) * count), cut=StateCut(1, 40 + row) if row else None)
        for row, count in enumerate(counts)
    )
    pages = np.arange(1, 1 + 7 * 700, dtype=np.int32).reshape(7, 700)
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
