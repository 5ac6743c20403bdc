"""How much shared memory one program may use, and loop sizes that fit into it.

Devices differ: 99 KB on consumer cards (compute capability 8.6, 8.9, 12.0), 163 KB on an A100, 227 KB on Hopper and on
Blackwell's data-center cards. A kernel requests the tile that is fastest with enough memory, and falls back to the
next smaller one. `bench/kernel_fit.py` compiles the kernels for any device and prints their shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from cortex.neuron.kernels.device_properties import CPU, properties_of

SLACK_BYTES = 2 << 10
"""Reserved for what a program keeps besides its tiles: page ids, partial sums."""
MIN_STAGES = 3
"""With fewer tiles in flight, a loop over a matrix does not saturate the memory bandwidth."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    num_bytes: int
    """The limit for one program."""
    copies: int
    """Buffers per operand in a loop of two stages: one, or two where matrix products run asynchronously."""

    def holds(self, num_bytes: int) -> bool:
        return num_bytes + SLACK_BYTES <= self.num_bytes


SMALLEST = SharedMemory(CPU.shared_bytes, copies=1)
"""The shared memory of the smallest supported devices."""


@cache
def shared_memory(device: torch.device) -> SharedMemory:
    """The shared memory of `device`. On a CPU, where kernels are interpreted, it is SMALLEST."""
    properties = properties_of(device)
    return SharedMemory(properties.shared_bytes, copies=2 if properties.capability[0] in (9, 10) else 1)


def loop_over_columns(columns: int, stages: int, column_bytes: int, shared: SharedMemory) -> tuple[int, int]:
    """The columns per step of a matrix product, and the number of stages, both at most as requested.

    Columns are halved before stages fall below MIN_STAGES. `column_bytes` is the size of one column of all operands. A
    loop has one buffer fewer than stages, because one tile is being multiplied. Asynchronous products need all.
    """
    unbuffered = 2 - shared.copies
    while columns > 32 and not shared.holds((MIN_STAGES - unbuffered) * columns * column_bytes):
        columns //= 2
    buffers = (shared.num_bytes - SLACK_BYTES) // (columns * column_bytes)
    return columns, max(1, min(stages, buffers + unbuffered))
