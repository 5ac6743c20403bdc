"""How small-batch products are cut, on large and on small devices."""

import pytest

from cortex.neuron.kernels.jit import TRITON
from cortex.neuron.kernels.quantised.experts import PackedExpertTiles, packed_expert_tiles
from cortex.neuron.kernels.quantised.few_rows import few_rows_tiles, max_few_rows
from cortex.neuron.kernels.quantised.layout import IQ4, Q2, Q4, Q5, Q6, Q8, Layout
from cortex.neuron.kernels.quantised.product import (
    PackedTiles,
    fitting_stages,
    product_columns,
    program_bytes,
    small_batch_tiles,
)
from cortex.neuron.kernels.shared_memory import SMALLEST, SharedMemory

HOPPER = SharedMemory(227 << 10, copies=2)
pytestmark = pytest.mark.skipif(not TRITON, reason="tiles are cut for Triton")


LAYOUTS = [Q2, Q4, Q5, Q6, Q8, IQ4]


@pytest.mark.parametrize("rows", [1, 16, 33, 64])
@pytest.mark.parametrize("outputs", [512, 4096, 24576, 151936])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tiles_fit_the_device_and_split_whole_steps(rows: int, outputs: int, layout: Layout) -> None:
    for shared, processors in ((HOPPER, 132), (SMALLEST, 28)):
        for chunks in (7, 96):
            tiles = small_batch_tiles(rows, chunks, outputs, layout, processors, shared)
            columns = product_columns(rows)
            num_bytes = program_bytes(tiles.outputs, columns, tiles.chunks, tiles.stages, layout, shared)
            assert shared.holds(num_bytes)
            assert tiles.stages >= 3
            assert chunks % (tiles.split * tiles.chunks) == 0
            assert 128 <= tiles.registers <= 255
            assert 32 * tiles.warps * tiles.registers <= 65_536


@pytest.mark.parametrize("rows", [9, 32, 64])
@pytest.mark.parametrize("outputs", [2048, 4096, 6144])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_programs_run_all_at_once(rows: int, outputs: int, layout: Layout) -> None:
    tiles = small_batch_tiles(rows, 32, outputs, layout, 132, HOPPER)
    num_bytes = program_bytes(tiles.outputs, product_columns(rows), tiles.chunks, tiles.stages, layout, HOPPER)
    at_once = min(HOPPER.num_bytes // num_bytes, 65_536 // (32 * tiles.warps * tiles.registers))
    assert outputs // tiles.outputs * tiles.split <= at_once * 132


def test_fewer_stages_only_where_memory_is_short() -> None:
    assert fitting_stages(64, 64, 1, 5, Q8, HOPPER) == 5
    assert fitting_stages(128, 64, 1, 4, Q8, SMALLEST) == 2


@pytest.mark.parametrize(
    ("layout", "pairs", "experts", "outputs", "chunks", "gated", "tiles"),
    [
        (Q4, 512, 128, 768, 16, True, PackedExpertTiles(16, 1, 2, 3)),
        (Q4, 512, 128, 2048, 6, False, PackedExpertTiles(16, 8, 2, 3)),
        (Q8, 512, 128, 2048, 6, False, PackedExpertTiles(16, 4, 2, 3)),  # eight blocks would take a second round
        (Q4, 72, 128, 2048, 6, False, PackedExpertTiles(16, 4, 2, 3)),  # eight blocks would leave processors idle
        (Q4, 512, 128, 2080, 6, False, PackedExpertTiles(16, 1, 2, 3)),
        (Q4, 512, 128, 768, 15, True, PackedExpertTiles(16, 1, 1, 3)),
        (Q8, 128, 8, 14336, 32, True, PackedExpertTiles(32, 1, 2, 3)),
        (Q4, 4096, 128, 768, 16, True, PackedExpertTiles(64, 1, 1, 3)),
    ],
)
def test_few_pairs_of_an_expert_read_whole_lines_in_long_programs(
    layout: Layout, pairs: int, experts: int, outputs: int, chunks: int, gated: bool, tiles: PackedExpertTiles
) -> None:
    assert packed_expert_tiles(pairs, experts, outputs, chunks, layout, 132, HOPPER, gated=gated) == tiles
    small = packed_expert_tiles(pairs, experts, outputs, chunks, layout, 28, SMALLEST, gated=gated)
    assert (small.blocks, small.chunks) == (1, 1) or small.stages == 3


@pytest.mark.parametrize(
    ("layout", "rows", "chunks", "outputs", "tiles"),
    [
        (Q4, 16, 32, 6144, PackedTiles(64, 2, 4, 4, 4, 168)),
        (Q4, 16, 32, 4096, PackedTiles(64, 2, 4, 3, 8, 128)),
        (Q4, 16, 32, 24576, PackedTiles(64, 2, 4, 4, 1, 168)),
        (Q4, 16, 16, 5120, PackedTiles(64, 2, 4, 4, 4, 168)),
        (Q4, 32, 32, 6144, PackedTiles(64, 2, 4, 3, 4, 168)),
        (Q4, 32, 96, 4096, PackedTiles(64, 2, 4, 4, 4, 255)),
        (Q4, 64, 32, 24576, PackedTiles(64, 1, 4, 3, 1, 168)),
        (Q6, 16, 32, 24576, PackedTiles(64, 2, 4, 4, 1, 168)),
        (Q6, 16, 32, 151936, PackedTiles(64, 2, 4, 3, 1, 128)),
        (Q6, 32, 32, 151936, PackedTiles(128, 2, 8, 3, 1, 128)),
        (Q6, 64, 32, 151936, PackedTiles(64, 1, 4, 3, 1, 168)),
        (Q8, 16, 32, 6144, PackedTiles(64, 2, 4, 3, 4, 168)),
        (Q8, 16, 96, 4096, PackedTiles(64, 2, 4, 4, 4, 255)),
        (Q8, 32, 32, 6144, PackedTiles(64, 2, 4, 3, 2, 255)),
        (Q8, 32, 32, 24576, PackedTiles(64, 2, 4, 3, 1, 255)),
        (Q8, 64, 32, 4096, PackedTiles(64, 2, 4, 4, 2, 255)),
        (Q8, 64, 32, 24576, PackedTiles(64, 1, 4, 3, 1, 168)),
        (Q8, 64, 32, 151936, PackedTiles(128, 2, 8, 3, 1, 255)),
        (Q8, 64, 96, 4096, PackedTiles(128, 2, 8, 3, 4, 255)),
        (Q8, 64, 76, 2560, PackedTiles(64, 1, 4, 4, 4, 255)),  # steps of two chunks could be split only once
        (Q4, 32, 76, 2560, PackedTiles(64, 1, 4, 5, 4, 168)),
    ],
)
def test_rows_are_read_in_whole_lines_where_that_was_faster(
    layout: Layout, rows: int, chunks: int, outputs: int, tiles: PackedTiles
) -> None:
    assert small_batch_tiles(rows, chunks, outputs, layout, 132, HOPPER) == tiles


@pytest.mark.parametrize("layout", [Q6, Q8])
def test_programs_of_a_few_rows_fit_on_a_processor_together(layout: Layout) -> None:
    tiles = few_rows_tiles(layout)
    assert tiles.programs * tiles.warps * 32 * tiles.registers <= 65_536
    assert tiles.chunks % tiles.warps == 0


@pytest.mark.parametrize(
    ("layout", "outputs", "rows"),
    [(Q4, 4096, 1), (Q5, 24576, 8), (Q6, 4096, 8), (Q6, 24576, 1), (Q6, 151936, 1), (Q8, 24576, 8), (Q8, 151936, 1)],
)
def test_few_rows_have_a_kernel_of_their_own_where_that_was_faster(layout: Layout, outputs: int, rows: int) -> None:
    assert max_few_rows(layout, outputs) == rows
