import pytest

from cortex.neuron.kernels.dense.blocks import Blocks, beats_library, small_batch_blocks

HOPPER = 132
WIDE = Blocks(128, 128, warps=8, stages=3)
NARROW = Blocks(64, 128, warps=4, stages=6)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "gated", "blocks"),
    [
        (8, 6144, 4096, False, Blocks(64, 256, warps=4, stages=4)),
        (8, 4096, 12_288, False, Blocks(16, 512, warps=2, stages=4)),
        (8, 151_936, 4096, False, WIDE),
        (8, 12_288, 4096, True, Blocks(64, 128, warps=4, stages=3, more_outputs=32)),
        (64, 12_288, 4096, True, Blocks(64, 128, warps=4, stages=3, more_outputs=32)),
        (32, 14_336, 4096, True, WIDE),
        (64, 14_336, 4096, True, Blocks(64, 128, warps=4, stages=2, together=2)),
        (32, 6144, 4096, True, Blocks(64, 128, warps=4, stages=4)),
        (128, 12_288, 4096, True, Blocks(64, 64, warps=8, stages=5, more_outputs=32)),
        (32, 6144, 4096, False, NARROW),
        (64, 12_352, 4096, False, NARROW._replace(stages=5, more_outputs=32)),
        (64, 4096, 12_288, False, NARROW._replace(stages=4, split=2)),
        (64, 2048, 4096, False, NARROW._replace(stages=4, split=4)),
        (32, 4096, 12_288, False, NARROW._replace(split=2)),
        (64, 4096, 4100, False, NARROW),
        (64, 9000, 4096, False, NARROW._replace(stages=5, more_outputs=32)),
        (64, 16_384, 4096, False, NARROW._replace(stages=3, together=2)),
        (32, 8, 24, False, NARROW._replace(inputs=32)),
    ],
)
def test_a_program_for_nearly_every_processor(
    rows: int, outputs: int, inputs: int, gated: bool, blocks: Blocks
) -> None:
    assert small_batch_blocks(rows, inputs, outputs, HOPPER, gated=gated) == blocks


@pytest.mark.parametrize("rows", [2, 17, 33, 100])
@pytest.mark.parametrize("gated", [False, True])
def test_programs_take_whole_steps_and_each_sum_has_its_counter(rows: int, gated: bool) -> None:
    for outputs in range(64, 20_000, 500):
        for inputs in (96, 1024, 2880, 4096, 12_288):
            blocks = small_batch_blocks(rows, inputs, outputs, HOPPER, gated=gated)
            assert blocks.split == 1 or inputs % (blocks.split * blocks.inputs) == 0
            assert blocks.split == 1 or blocks.outputs >= 64
            assert blocks.split == 1 or blocks.programs(outputs) <= HOPPER


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "gated", "is_faster"),
    [
        (16, 100, 100_000, False, True),
        (32, 6144, 4096, False, True),
        (32, 4096, 12_288, False, False),
        (64, 6144, 4096, False, False),
        (64, 12_352, 4096, False, True),
        (64, 4096, 12_288, False, True),
        (64, 151_936, 4096, False, False),
        (64, 12_288, 4096, True, True),
        (64, 14_336, 4096, True, True),
        (64, 6144, 4096, True, False),
        (65, 12_352, 4096, False, False),
        (128, 12_288, 4096, True, True),
        (129, 12_288, 4096, True, False),
    ],
)
def test_more_rows_are_the_librarys_unless_the_programs_fill_the_device(
    rows: int, outputs: int, inputs: int, gated: bool, is_faster: bool
) -> None:
    assert beats_library(rows, inputs, outputs, HOPPER, gated=gated) == is_faster
    if rows > 32:
        assert not beats_library(rows, inputs, outputs, HOPPER, gated=gated, is_asynchronous=False)
