"""The buffer through which a rank exchanges small messages with the others, and which models have one.

Imports no torch: the node's forecast counts it.
"""

from __future__ import annotations

from typing import Final

MAX_RANKS: Final = 16
MAX_BYTES: Final = 256 << 10
"""The largest part of one rank. Beyond it a library that sends each byte once is faster."""
CHUNK_BYTES: Final = 4 << 10
"""The bytes of one program: 16 for each of its threads."""
NUM_FLAGS: Final = MAX_RANKS * MAX_BYTES // CHUNK_BYTES
HEADER_BYTES: Final = 8 << 10
"""A flag for each (program, rank), and the turn of each program. The two halves for the parts follow."""
BUFFER_BYTES: Final = HEADER_BYTES + 2 * MAX_BYTES


def buffer_bytes(num_ranks: int, device_kind: str) -> int:
    """The bytes that each rank of a tensor-parallel model allocates if devices can access each other's memory."""
    has_buffer = device_kind == "cuda" and 1 < num_ranks <= MAX_RANKS
    return BUFFER_BYTES if has_buffer else 0
