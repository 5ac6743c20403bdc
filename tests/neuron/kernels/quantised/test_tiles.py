"""How small-batch products are cut, on large and on small devices."""

import pytest

from cortex.neuron.kernels.jit import TRITON
from cortex.neuron.kernels.quantised.experts import PackedExpertTiles, packed_expert_tiles
from cortex.neuron.kernels.quantised.few_rows import few_rows_tiles
from cortex.neuron.kernels.quantised.layout import Q2, Q4, Q5, Q6, Q8, Layout
from cortex.neuron.kernels.quantised.product import PackedTiles, fitting_stages, small_batch_tiles
from cortex.neuron.kernels.shared_memory import SMALLEST, SharedMemory

HOPPER = SharedMemory(227 << 10, copies=2)
pytestmark = pytest.mark.skipif(not TRITON, reason="tiles are cut for Triton")


@pytest.mark.parametrize("rows", [1, 16, 33, 64])
@pytest.mark.parametrize("outputs", [512, 4096, 24576, 151936])
@pytest.mark.parametrize("layout", [Q2, Q4, Q6, Q8])
def test_tiles_fit_the_shared_memory_and_split_whole_chunks(rows: int, outputs: int, layout: Layout) -> None:
    for shared, processors in ((HOPPER, 132), (SMALLEST, 28)):
        tiles = small_batch_tiles(rows, 96, outputs, layout, processors, shared)
        chunk_bytes = tiles.outputs * 256 + max(16, rows) * 256
        assert tiles.stages >= 2
        assert chunk_bytes * (tiles.stages - 2 + shared.copies) < shared.num_bytes
        assert 96 % tiles.split == 0


@pytest.mark.parametrize(("rows", "outputs", "stages"), [(8, 4096, 4), (8, 6144, 3), (64, 4096, 4), (64, 24576, 3)])
def test_programs_run_all_at_once(rows: int, outputs: int, stages: int) -> None:
    tiles = small_batch_tiles(rows, 32, outputs, Q5, 132, HOPPER)
    assert (tiles.stages, tiles.outputs) == (stages, 64)
    assert tiles.split > 1 or outputs == 24576


def test_fewer_stages_only_where_memory_is_short() -> None:
    assert fitting_stages(64, 64, 5, HOPPER) == 5
    assert fitting_stages(128, 64, 3, SMALLEST) < 4


@pytest.mark.parametrize(
    ("pairs", "outputs", "chunks", "gated", "tiles"),
    [
        (512, 768, 16, True, PackedExpertTiles(16, 1, 2, 3)),
        (512, 2048, 6, False, PackedExpertTiles(16, 8, 2, 3)),
        (72, 2048, 6, False, PackedExpertTiles(16, 4, 2, 3)),  # eight blocks would leave processors idle
        (512, 2080, 6, False, PackedExpertTiles(16, 1, 2, 3)),
        (512, 768, 15, True, PackedExpertTiles(16, 1, 1, 3)),
        (4096, 768, 16, True, PackedExpertTiles(64, 1, 1, 3)),
    ],
)
def test_few_pairs_of_an_expert_read_whole_lines_in_long_programs(
    pairs: int, outputs: int, chunks: int, gated: bool, tiles: PackedExpertTiles
) -> None:
    assert packed_expert_tiles(pairs, 128, outputs, chunks, 132, HOPPER, gated=gated) == tiles
    small = packed_expert_tiles(pairs, 128, outputs, chunks, 28, SMALLEST, gated=gated)
    assert (small.blocks, small.chunks) == (1, 1) or small.stages == 3


@pytest.mark.parametrize(
    ("rows", "chunks", "outputs", "tiles"),
    [
        (16, 32, 6144, PackedTiles(64, 2, 4, 4, 4)),
        (16, 32, 4096, PackedTiles(64, 2, 4, 3, 8)),
        (16, 32, 24576, PackedTiles(64, 2, 4, 4, 1)),
        (16, 96, 4096, PackedTiles(64, 2, 4, 3, 8)),
        (16, 16, 5120, PackedTiles(64, 2, 4, 4, 4)),
        (16, 32, 2048, PackedTiles(64, 2, 4, 4, 8)),
        (32, 32, 6144, PackedTiles(64, 2, 4, 3, 4)),
        (32, 32, 4096, PackedTiles(64, 2, 4, 4, 4)),
        (32, 32, 24576, PackedTiles(64, 2, 4, 3, 1)),
        (32, 96, 4096, PackedTiles(64, 2, 4, 4, 4)),
        (64, 32, 6144, PackedTiles(64, 2, 4, 3, 1)),
        (64, 32, 4096, PackedTiles(64, 2, 4, 3, 2)),
        (64, 32, 24576, PackedTiles(64, 1, 4, 3, 1)),
        (64, 96, 4096, PackedTiles(64, 1, 4, 5, 4)),
        (64, 16, 5120, PackedTiles(64, 2, 4, 3, 1)),
        (64, 32, 2048, PackedTiles(64, 2, 4, 3, 4)),
    ],
)
def test_four_bits_are_read_in_whole_lines_where_that_was_faster(
    rows: int, chunks: int, outputs: int, tiles: PackedTiles
) -> None:
    assert small_batch_tiles(rows, chunks, outputs, Q4, 132, HOPPER) == tiles


@pytest.mark.parametrize(("chunks", "outputs", "split"), [(16, 5120, 2), (32, 2048, 4), (32, 4096, 4), (96, 4096, 4)])
def test_parts_of_many_rows_are_long(chunks: int, outputs: int, split: int) -> None:
    assert small_batch_tiles(64, chunks, outputs, Q5, 132, HOPPER).split == split


@pytest.mark.parametrize("layout", [Q6, Q8])
def test_programs_of_a_few_rows_fit_on_a_processor_together(layout: Layout) -> None:
    tiles = few_rows_tiles(layout)
    assert tiles.programs * tiles.warps * 32 * tiles.registers <= 65_536
    assert tiles.chunks % tiles.warps == 0
