"""How GEMMs with packed matrices and up to 64 rows are cut into programs. Experts use its sums of memory, too."""

from __future__ import annotations

from typing import NamedTuple

from cortex.neuron.kernels.products.small_batch import COUNTED_ROWS
from cortex.neuron.kernels.quantised.layout import CHUNK, Layout
from cortex.neuron.kernels.shared_memory import MIN_STAGES, SharedMemory

_RESERVED_BYTES = 1 << 10
"""Shared memory that a device takes for each program."""
_MAX_WARPS = 16
"""On a processor: with more of them a thread has too few registers."""


class PackedTiles(NamedTuple):
    """How a GEMM is cut into programs."""

    outputs: int
    chunks: int
    """Chunks of 128 columns, at a time."""
    warps: int
    stages: int
    split: int
    """Programs that share the columns of one row."""
    registers: int
    """The most registers of a thread: as many programs run on a processor as its shared memory holds."""


def small_batch_tiles(
    rows: int, chunks: int, outputs: int, layout: Layout, processors: int, shared: SharedMemory
) -> PackedTiles:
    """The fastest of a sweep on Hopper.

    Two chunks of a row are at least a line of the cache in four bits and more. With many rows they take so much shared
    memory that a processor runs one program: they are read one at a time where programs are more than that, or few and
    long because single chunks can be split further.
    """
    columns = product_columns(rows)

    def tiles(matrix_rows: int, tile_chunks: int, warps: int) -> PackedTiles:
        programs, split = -(-outputs // matrix_rows), 1

        def at_once(stages: int) -> int:
            num_bytes = program_bytes(matrix_rows, columns, tile_chunks, stages, layout, shared) + _RESERVED_BYTES
            return max(1, min(_MAX_WARPS // warps, shared.num_bytes // num_bytes))

        while split < 8 and chunks % (2 * split * tile_chunks) == 0 and chunks // split > 4:
            if 2 * split * programs > at_once(MIN_STAGES) * processors:
                break
            split *= 2
        stages = max(MIN_STAGES, 6 - matrix_rows * tile_chunks // COUNTED_ROWS)  # the larger, the fewer
        stages = fitting_stages(matrix_rows, columns, tile_chunks, stages, layout, shared)
        while stages > MIN_STAGES and programs * split > at_once(stages) * processors:
            stages -= 1
        registers = min(255, 65536 // (32 * warps * at_once(stages)) // 8 * 8) if shared.copies > 1 else 255
        return PackedTiles(matrix_rows, tile_chunks, warps, stages, split, registers)

    if shared.copies == 1 or chunks % 2 != 0:
        return tiles(COUNTED_ROWS, 1, 4)
    is_long = outputs > 8 * COUNTED_ROWS * processors  # as an output head
    if is_long and 16 < columns <= (64 if layout.bits == 8 else 32):
        return tiles(2 * COUNTED_ROWS, 2, 8)
    lines = tiles(2 * COUNTED_ROWS, 2, 8) if columns > 32 and chunks > 64 else tiles(COUNTED_ROWS, 2, 4)
    programs = -(-outputs // lines.outputs) * lines.split
    few_long = 3 * programs < 2 * processors and chunks // lines.split > 32
    if (columns > 16 and few_long) or (columns > 32 and programs > processors):
        return tiles(COUNTED_ROWS, 1, 4)
    return lines


def product_columns(rows: int) -> int:
    """Columns of the tensor-core product for this many rows of x."""
    return max(16, 1 << (rows - 1).bit_length())


def fitting_stages(
    matrix_rows: int, columns: int, chunks: int, stages: int, layout: Layout, shared: SharedMemory
) -> int:
    """At most `stages`, as the device's shared memory holds."""
    while stages > 2 and not shared.holds(program_bytes(matrix_rows, columns, chunks, stages, layout, shared)):
        stages -= 1
    return stages


def program_bytes(
    matrix_rows: int, columns: int, chunks: int, stages: int, layout: Layout, shared: SharedMemory
) -> int:
    """Shared memory of a loop over `chunks` chunks at a time: the words of `matrix_rows` rows and `columns` columns of
    x, once for each step that is on its way.

    Before Hopper the unpacked weights may take the way through shared memory after all.
    """
    x_bytes = columns * chunks * CHUNK * 2
    unpacked_bytes = matrix_rows * chunks * CHUNK * 2 if shared.copies == 1 else 0
    return (
        (stages - 1) * matrix_rows * layout.num_bytes(1, chunks * CHUNK)
        + (stages - 2 + shared.copies) * x_bytes
        + unpacked_bytes
    )
