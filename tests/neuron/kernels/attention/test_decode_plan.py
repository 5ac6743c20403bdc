"""How decode attention divides the keys, by the sizes of the step and of the heads, and by the lengths of the rows."""

import itertools
import random

import pytest
import torch

from cortex.neuron.kernels.attention.decode_plan import TILE, DecodePlan, KeyDivision, decode_plan
from cortex.neuron.kernels.attention.split_keys import KeySplits
from cortex.neuron.kernels.shared_memory import SMALLEST, SharedMemory

HOPPER = SharedMemory(227 << 10, copies=2)
PROCESSORS = 132
CONTEXT = 40_960


@pytest.mark.parametrize(
    ("rows", "kv_heads", "group", "dim", "shares", "tile", "warps", "holds", "joins"),
    [
        (1, 8, 4, 128, 66, 64, 2, True, False),
        (8, 8, 4, 128, 64, 64, 2, True, False),
        (32, 8, 4, 128, 32, 128, 4, True, False),
        (48, 8, 4, 128, 48, 64, 2, True, False),
        (256, 8, 4, 128, 192, 64, 2, True, False),
        (1, 8, 8, 64, 66, 128, 2, True, False),
        (32, 8, 8, 64, 32, 256, 4, True, False),
        (64, 8, 8, 64, 49, 128, 2, True, False),
        (1, 4, 4, 256, 66, 32, 4, False, True),
        (8, 4, 4, 256, 64, 32, 4, False, True),
        (64, 4, 4, 256, 64, 64, 4, False, True),
        (1, 2, 8, 256, 132, 32, 4, False, True),
        (64, 2, 8, 256, 128, 64, 4, False, True),
        (64, 1, 8, 512, 256, 32, 8, False, True),
    ],
)
def test_programs_fill_the_device_and_parts_of_large_heads_are_joined_by_a_second_launch(
    rows: int, kv_heads: int, group: int, dim: int, shares: int, tile: int, warps: int, holds: bool, joins: bool
) -> None:
    plan = decode_plan(rows, kv_heads, CONTEXT, group, dim, 2, PROCESSORS, HOPPER)
    division = KeyDivision(64, shares, min(64 * rows, rows - 1 + shares), tile)
    assert plan == DecodePlan(division, warps, holds, joins)


@pytest.mark.parametrize(("rows", "warps"), [(1, 4), (8, 4), (64, 2)])
def test_a_window_that_one_tile_holds_is_one_tile(rows: int, warps: int) -> None:
    plan = decode_plan(rows, 8, 128, 8, 64, 2, PROCESSORS, HOPPER)  # gpt-oss
    assert (plan.division.tile, plan.warps) == (128, warps)


@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("length", [1, TILE, 3 * TILE + 1])
def test_no_part_is_shorter_than_a_tile_and_every_plan_fits(dim: int, length: int) -> None:
    for rows in (1, 7, 300, 70_000):
        plan = decode_plan(rows, 1, length, 4, dim, 2, PROCESSORS, SMALLEST)
        assert 1 <= plan.division.parts <= -(-length // TILE)
        assert plan.division.tile in (16, 32, 64, 128, 256)
        assert not (plan.joins and plan.division.parts == 1)


@pytest.mark.parametrize(("window", "has_new"), [(0, False), (100, False), (0, True)])
@pytest.mark.parametrize("rows", [1, 6, 48, 530])
def test_every_key_has_one_program_and_no_program_has_many_more_than_the_others(
    device: torch.device, rows: int, window: int, has_new: bool
) -> None:
    draw = random.Random(rows + window)
    for longest in (1, 300, 20_000):
        lengths = [draw.randrange(1, 200) for _ in range(rows - 1)] + [longest]
        plan = decode_plan(rows, 8, window or 1 << 15, 4, 128, 2, PROCESSORS, HOPPER).division
        table_rows = torch.randperm(rows, device=device)
        parts = KeySplits(
            torch.tensor(lengths, dtype=torch.int32, device=device), table_rows, plan, window, has_new=has_new
        )
        found: dict[int, list[tuple[int, ...]]] = {}
        programs = [tuple(words[:6]) for words in parts.of_programs.tolist()]
        for row, table_row, begin, end, part, num_parts in [words for words in programs if words[5]]:
            assert table_row == table_rows[row]
            found.setdefault(row, []).append((part, begin, end, num_parts))
        firsts = [max(0, length - window) if window else 0 for length in lengths]
        share = max(
            plan.tile, sum(length - 1 - first for length, first in zip(lengths, firsts, strict=True)) / plan.shares
        )
        for row, (length, first) in enumerate(zip(lengths, firsts, strict=True)):
            own = found[row]
            assert [part for part, *_ in own] == list(range(len(own)))
            assert {num_parts for *_, num_parts in own} == {len(own)}
            assert own[0][1] == first
            assert own[-1][2] == length - (not has_new)
            assert all(before[2] == after[1] for before, after in itertools.pairwise(own))
            if len(own) < plan.parts:
                assert all(end - begin <= 1.5 * (share + 1) + plan.tile for _, begin, end, _ in own)
            begin, count = parts.of_rows[row].tolist()
            assert count == len(own)
            assert programs[begin][:2] == (row, table_rows[row])
        several = [words[5] > 1 for words in programs if words[5]]
        assert several == sorted(several, reverse=True), "long rows start first"


@pytest.mark.parametrize("rows", [1, 8, 33, 48, 64, 128, 256])
def test_rows_of_one_length_are_divided_evenly(device: torch.device, rows: int) -> None:
    plan = decode_plan(rows, 8, 1 << 15, 4, 128, 2, PROCESSORS, HOPPER).division
    lengths = torch.full((rows,), 30_001, dtype=torch.int32, device=device)
    counts = set(KeySplits(lengths, torch.arange(rows, device=device), plan, has_new=False).of_rows[:, 1].tolist())
    assert len(counts) == 1
    assert (counts == {1}) == (rows > 24), "a program each, where rows alone fill the device"
