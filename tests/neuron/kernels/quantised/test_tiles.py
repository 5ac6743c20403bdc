"""How small-batch products are cut, on large and on small devices."""

import pytest

from cortex.neuron.kernels.jit import TRITON
from cortex.neuron.kernels.quantised.layout import Q2, Q4, Q6, Q8, Layout
from cortex.neuron.kernels.quantised.product import fitting_stages, small_batch_tiles
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


@pytest.mark.parametrize(("rows", "outputs", "stages"), [(8, 4096, 5), (8, 6144, 3), (64, 4096, 5), (64, 24576, 3)])
def test_programs_run_all_at_once(rows: int, outputs: int, stages: int) -> None:
    tiles = small_batch_tiles(rows, 32, outputs, Q4, 132, HOPPER)
    assert (tiles.stages, tiles.outputs) == (stages, 64)
    assert tiles.split > 1 or outputs == 24576


def test_fewer_stages_only_where_memory_is_short() -> None:
    assert fitting_stages(64, 64, 5, HOPPER) == 5
    assert fitting_stages(128, 64, 3, SMALLEST) < 4
