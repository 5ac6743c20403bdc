"""How much shared memory one program may use, and loops that fit it.

Devices differ: 99 KB on consumer cards (compute capability 8.6, 8.9, 12.0), 163 KB on an A100, 227 KB on Hopper and on
Blackwell's data-center cards. A kernel asks for the tile that is fastest where there is plenty and takes the next
smaller one where there is not. `bench/kernel_fit.py` compiles the kernels for any device and shows what they take.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

SLACK_BYTES = 2 << 10
"""Beside its tiles a program keeps page numbers, partial sums and the like."""
MIN_STAGES = 3
"""A loop over a matrix that has fewer tiles on their way leaves the memory idle."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    num_bytes: int
    """What one program may use."""
    copies: int
    """Buffers that a loop of two stages keeps of an operand: one, or two where products run on while the loop does."""

    def holds(self, num_bytes: int) -> bool:
        return num_bytes + SLACK_BYTES <= self.num_bytes


SMALLEST = SharedMemory(99 << 10, copies=1)
"""That of the smallest supported devices."""


@cache
def shared_memory(device: torch.device) -> SharedMemory:
    """Off the GPU, where kernels are interpreted, that of the smallest."""
    if device.type != "cuda":
        return SMALLEST
    properties = torch.cuda.get_device_properties(device)
    num_bytes: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # not in the stubs
    return SharedMemory(num_bytes, copies=2 if properties.major in (9, 10) else 1)


def loop_over_columns(columns: int, stages: int, column_bytes: int, shared: SharedMemory) -> tuple[int, int]:
    """Columns of a matrix product's operands at a time, and how many such steps are on their way at once: at most those
    asked for, and fewer columns before fewer than MIN_STAGES. `column_bytes`: one column of all operands.

    A loop keeps a buffer less than it has stages, as one is being multiplied; not so where products run on.
    """
    unbuffered = 2 - shared.copies
    while columns > 32 and not shared.holds((MIN_STAGES - unbuffered) * columns * column_bytes):
        columns //= 2
    buffers = (shared.num_bytes - SLACK_BYTES) // (columns * column_bytes)
    return columns, max(1, min(stages, buffers + unbuffered))
