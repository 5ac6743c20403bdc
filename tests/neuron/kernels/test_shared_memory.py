"""Tile sizes by shared memory: Hopper uses the tuned sizes, smaller devices use sizes that fit."""

import pytest

from cortex.neuron.kernels.attention.decode_plan import fitting_tile
from cortex.neuron.kernels.attention.prefill import fitting_tiles
from cortex.neuron.kernels.delta.chunks import carry_stages
from cortex.neuron.kernels.dense.blocks import small_batch_blocks
from cortex.neuron.kernels.mamba.chunks import chunk_stages
from cortex.neuron.kernels.shared_memory import MIN_STAGES, SMALLEST, SharedMemory, loop_over_columns

HOPPER = SharedMemory(227 << 10, copies=2)
A100 = SharedMemory(163 << 10, copies=1)
DEVICES = {"consumer": SMALLEST, "a100": A100, "hopper": HOPPER}


@pytest.mark.parametrize(
    ("device", "dim", "element_bytes", "tiles"),
    [
        ("hopper", 64, 2, (128, 128, 8)),
        ("hopper", 128, 2, (128, 128, 8)),
        ("hopper", 256, 2, (128, 64, 8)),  # with 128 keys: 320 KB
        ("hopper", 128, 4, (128, 64, 8)),
        ("hopper", 256, 4, (64, 32, 4)),
        ("a100", 128, 2, (128, 128, 8)),
        ("a100", 256, 2, (128, 64, 8)),
        ("consumer", 64, 2, (128, 128, 8)),
        ("consumer", 128, 2, (128, 64, 8)),
        ("consumer", 256, 2, (64, 32, 4)),
        ("consumer", 128, 4, (64, 32, 4)),
        ("consumer", 256, 4, (32, 16, 4)),
    ],
)
def test_prefill_uses_the_largest_tiles_that_fit(
    device: str, dim: int, element_bytes: int, tiles: tuple[int, int, int]
) -> None:
    assert fitting_tiles(False, dim, element_bytes, DEVICES[device]) == tiles


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dim", "element_bytes"), [(64, 2), (128, 2), (256, 2), (128, 4)])
def test_few_tokens_have_small_tiles_where_two_programs_fit_on_a_processor(
    device: str, dim: int, element_bytes: int
) -> None:
    are_small = device == "hopper" and dim * element_bytes <= 256
    long = fitting_tiles(False, dim, element_bytes, DEVICES[device])
    assert fitting_tiles(True, dim, element_bytes, DEVICES[device]) == ((64, 64, 4) if are_small else long)


@pytest.mark.parametrize(
    ("device", "wanted", "dim", "element_bytes", "tile"),
    [
        ("hopper", 128, 128, 2, 128),
        ("hopper", 128, 256, 2, 128),
        ("hopper", 64, 256, 2, 64),
        ("a100", 128, 256, 2, 128),
        ("consumer", 128, 128, 2, 128),
        ("consumer", 128, 256, 2, 64),
        ("consumer", 64, 256, 2, 64),
        ("consumer", 128, 256, 4, 16),
    ],
)
def test_decode_uses_the_requested_tile_or_the_next_smaller_that_fits(
    device: str, wanted: int, dim: int, element_bytes: int, tile: int
) -> None:
    assert fitting_tile(wanted, 16, dim * element_bytes, DEVICES[device]) == tile


@pytest.mark.parametrize("rows", [2, 16, 32, 64])
@pytest.mark.parametrize(
    ("inputs", "outputs", "gated"),
    [
        (4096, 6144, False),
        (4096, 4096, False),
        (12_288, 4096, False),
        (4096, 151_936, False),
        (4096, 12_288, True),
        (8, 24, False),
    ],
)
def test_small_batch_products_keep_tuned_blocks_on_hopper_and_fit_every_device(
    rows: int, inputs: int, outputs: int, gated: bool
) -> None:
    blocks = small_batch_blocks(rows, inputs, outputs, 132, gated=gated)
    assert blocks.inputs >= 16, "a product of tiles takes no fewer"
    column_bytes = ((1 + gated) * (blocks.outputs + blocks.more_outputs) + max(16, rows)) * 2
    assert loop_over_columns(blocks.inputs, blocks.stages, column_bytes, HOPPER) == (blocks.inputs, blocks.stages)
    for shared in DEVICES.values():
        columns, kept = loop_over_columns(blocks.inputs, blocks.stages, column_bytes, shared)
        assert kept >= MIN_STAGES
        assert shared.holds((kept - 2 + shared.copies) * columns * column_bytes)


@pytest.mark.parametrize(
    ("device", "key_block", "element_bytes", "stages"),
    [
        ("hopper", 128, 2, 3),
        ("a100", 128, 2, 3),
        ("consumer", 128, 2, 2),
        ("hopper", 256, 2, 2),
        ("consumer", 256, 2, 1),
        ("a100", 128, 4, 2),
    ],
)
def test_chunks_are_prefetched_as_far_as_they_fit(device: str, key_block: int, element_bytes: int, stages: int) -> None:
    assert carry_stages(key_block, 32, element_bytes, DEVICES[device]) == stages


@pytest.mark.parametrize(
    ("device", "state_block", "stages"),
    [("hopper", 128, 2), ("consumer", 128, 2), ("hopper", 256, 2), ("consumer", 256, 1)],
)
def test_chunks_of_mamba_are_prefetched_if_two_fit(device: str, state_block: int, stages: int) -> None:
    assert chunk_stages(state_block, 32, 2, DEVICES[device]) == stages
