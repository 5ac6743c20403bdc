"""How a small-batch GEMM is cut into programs, and where it is faster than the library's.

Bound by the bytes of the matrix: a program for nearly every processor, none with a second turn. A block of rows is a
power of two, so a program may have a second one of half its height. Where a matrix has too few blocks, several programs
divide its columns. A program that is alone on its processor takes more than half of the shared memory: programs that
start early would otherwise share some processors, and leave others without one.
"""

from __future__ import annotations

from typing import NamedTuple

MANY_OUTPUTS = 65_536
"""Heads of models have as many, so that their programs take many turns."""
FULL, FULL_GATED = 0.9, 0.84
"""The share of the processors that have a program, where small-batch GEMMs of more than 32 rows are faster than the
library's, which have clusters of programs that share what they read; and where up to 64 save an activation's launch."""


class Blocks(NamedTuple):
    """The block of a GEMM that one program computes."""

    outputs: int
    inputs: int
    """Per iteration of the loop."""
    warps: int
    stages: int
    more_outputs: int = 0
    """The outputs of a second, smaller block of rows."""
    split: int = 1
    """Programs that divide the columns of the matrix."""
    together: int = 1
    """Programs that a processor runs at once."""

    def programs(self, outputs: int) -> int:
        return -(-outputs // (self.outputs + self.more_outputs)) * self.split

    def busy_share(self, outputs: int, processors: int) -> float:
        """The share of the processors that have a program, over all turns."""
        programs, places = self.programs(outputs), processors * self.together
        return programs / (-(-programs // places) * places)


def small_batch_blocks(rows: int, inputs: int, outputs: int, processors: int, *, gated: bool) -> Blocks:
    """The fastest blocks of a sweep on Hopper. Devices with less shared memory reduce them. A product of tiles takes 16
    inputs or more."""
    if outputs > MANY_OUTPUTS:
        choice = [Blocks(128, 128, warps=8, stages=3)]
    elif gated and rows > 64:
        choice = [Blocks(64, 64, warps=8, stages=5, more_outputs=32)]
    elif gated and rows > 32:
        narrow = Blocks(64, 128, warps=4, stages=3)
        choice = [narrow._replace(stages=2, together=2), narrow._replace(more_outputs=32)]
    elif gated:
        narrow = Blocks(64, 128, warps=4, stages=4)
        choice = [Blocks(128, 128, warps=8, stages=3), narrow._replace(stages=3, more_outputs=32), narrow]
    elif rows <= 16:
        choice = [Blocks(64, 256, warps=4, stages=4) if outputs > 4096 else Blocks(16, 512, warps=2, stages=4)]
    else:
        choice = _plain_blocks(rows, inputs, outputs, processors)
    blocks = max(choice, key=lambda each: each.busy_share(outputs, processors))
    return blocks._replace(inputs=max(16, min(blocks.inputs, _next_power_of_2(inputs))))


def _plain_blocks(rows: int, inputs: int, outputs: int, processors: int) -> list[Blocks]:
    """Blocks for 17 rows or more of a product without a gate. As many programs as there are processors, or fewer, may
    divide the columns, in whole steps."""
    one = Blocks(64, 128, warps=4, stages=6)
    if one.programs(outputs) > processors:
        one = one._replace(stages=3, together=2)
    divided = [Blocks(64, 128, warps=4, stages=6 if rows <= 32 else 4, split=split) for split in (2, 4)]
    fitting = (
        each for each in divided if each.programs(outputs) <= processors and inputs % (each.inputs * each.split) == 0
    )
    return [one, Blocks(64, 128, warps=4, stages=5, more_outputs=32), *fitting]


def beats_library(
    rows: int, inputs: int, outputs: int, processors: int, *, gated: bool, is_asynchronous: bool = True
) -> bool:
    """Whether small-batch GEMMs were measured to be faster than norm, library GEMM and addition in sequence.

    `outputs`: with a gate, those of either half. `is_asynchronous`: the processors multiply while they load, as from
    Hopper on.
    """
    if rows <= 32:
        return rows <= 16 or inputs <= 8192
    if not is_asynchronous or rows > (128 if gated else 64):
        return False
    blocks = small_batch_blocks(rows, inputs, outputs, processors, gated=gated)
    is_one_turn = blocks.programs(outputs) <= processors * blocks.together
    return is_one_turn and blocks.busy_share(outputs, processors) >= (FULL_GATED if gated and rows <= 64 else FULL)


def _next_power_of_2(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
