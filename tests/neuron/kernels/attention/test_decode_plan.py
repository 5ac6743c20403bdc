"""How decode attention divides the keys, by the sizes of the step and of the heads."""

import pytest

from cortex.neuron.kernels.attention.decode_plan import TILE, DecodePlan, decode_plan
from cortex.neuron.kernels.shared_memory import SMALLEST, SharedMemory

HOPPER = SharedMemory(227 << 10, copies=2)
PROCESSORS = 132
CONTEXT = 40_960


@pytest.mark.parametrize(
    ("cells", "group", "dim", "plan"),
    [
        (1 * 8, 4, 128, DecodePlan(splits=49, tile=64, warps=2, holds=True, joins=False)),
        (8 * 8, 4, 128, DecodePlan(splits=6, tile=64, warps=2, holds=True, joins=False)),
        (32 * 8, 4, 128, DecodePlan(splits=1, tile=128, warps=4, holds=True, joins=False)),
        (64 * 8, 4, 128, DecodePlan(splits=1, tile=64, warps=2, holds=True, joins=False)),
        (1 * 4, 4, 256, DecodePlan(splits=64, tile=32, warps=4, holds=False, joins=True)),
        (8 * 4, 4, 256, DecodePlan(splits=8, tile=32, warps=4, holds=False, joins=True)),
        (64 * 4, 4, 256, DecodePlan(splits=1, tile=64, warps=4, holds=False, joins=False)),
        (1 * 2, 8, 256, DecodePlan(splits=64, tile=32, warps=4, holds=False, joins=True)),
        (64 * 2, 8, 256, DecodePlan(splits=2, tile=64, warps=4, holds=False, joins=True)),
        (64 * 1, 8, 512, DecodePlan(splits=4, tile=32, warps=8, holds=False, joins=True)),
    ],
)
def test_programs_fill_the_device_and_parts_of_large_heads_are_joined_by_a_second_launch(
    cells: int, group: int, dim: int, plan: DecodePlan
) -> None:
    assert decode_plan(cells, CONTEXT, group, dim, 2, PROCESSORS, HOPPER) == plan


@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("length", [1, TILE, 3 * TILE + 1])
def test_no_split_is_shorter_than_a_tile_and_every_plan_fits(dim: int, length: int) -> None:
    for cells in (1, 7, 300, 70_000):
        plan = decode_plan(cells, length, 4, dim, 2, PROCESSORS, SMALLEST)
        assert 1 <= plan.splits <= -(-length // TILE)
        assert plan.tile in (16, 32, 64, 128)
        assert not (plan.joins and plan.splits == 1)
