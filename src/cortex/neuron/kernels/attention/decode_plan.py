"""How the programs of decode attention divide the keys. Pure decisions over sizes, as measured on Hopper."""

from __future__ import annotations

from dataclasses import dataclass

from cortex.neuron.kernels.shared_memory import SharedMemory

TILE, SHORT_TILE = 64, 32
PROGRAMS_PER_PROCESSOR, LARGE_PER_PROCESSOR = 3, 2
"""This many programs saturate the memory bandwidth, or fit where heads are large; more parts only add work."""
FEW_PER_PROCESSOR, FEW_ROWS = 4, 16
"""The keys of few rows are divided among more programs, which evens out when they end."""
NARROW = 64
"""Up to this head size a tile has twice as many positions, which are as many bytes."""
LARGE, LARGE_WARPS = 256, 4
WIDE, WIDE_WARPS = 512, 8
"""From these head sizes on, fewer warps have too few registers."""
MAX_PARTS = 64
"""Programs that divide the keys of a row and kv head, at most."""
MIN_GROUP = 4
"""Query heads of a kv head are padded to this number."""
QUERY_BYTES = 4 << 10
"""Shared memory for intermediate values of the queries, besides the queries."""


@dataclass(frozen=True, slots=True)
class KeyDivision:
    """How programs divide the keys of the rows of a step, whose lengths only the device knows."""

    parts: int
    """Maximum number of programs for a row."""
    shares: int
    """The number of equal shares into which all keys are divided. A row gets one program per share, rounded, and at
    least one, so rows of equal length are divided evenly and no program has more than one and a half shares."""
    programs: int
    """Enough for rows of any lengths."""
    tile: int
    """Positions that a program takes at once: a part is a multiple."""

    @classmethod
    def of(cls, rows: int, at_once: int, parts: int, tile: int) -> KeyDivision:
        """`at_once`: programs that the device runs at once. Where rows are more than these, a share is a third longer
        than the rows are on average."""
        shares = rows * (at_once // rows) if rows <= at_once else max(1, at_once, rows * 3 // 4)
        return cls(parts, shares, min(rows * parts, rows - 1 + shares), tile)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    division: KeyDivision
    """For each kv head."""
    warps: int
    holds: bool
    """Whether the first tile is loaded into registers before the queries are there. Large heads need the registers."""
    joins: bool
    """Whether a second launch combines the parts of a row. For large heads this is faster than letting the last
    program of a kv head combine them."""


def decode_plan(
    rows: int,
    kv_heads: int,
    max_length: int,
    group_pad: int,
    dim_block: int,
    element_bytes: int,
    processors: int,
    shared: SharedMemory,
) -> DecodePlan:
    """max_length: positions that a row attends to, at most. group_pad, dim_block: the query heads of a kv head and the
    dimensions of a head, as powers of two."""
    is_large = dim_block >= LARGE
    per_processor = FEW_PER_PROCESSOR if rows <= FEW_ROWS else PROGRAMS_PER_PROCESSOR
    if is_large:
        per_processor = LARGE_PER_PROCESSOR
    at_once = per_processor * processors // kv_heads
    usual = TILE * (1 + (dim_block <= NARROW))
    most = min(MAX_PARTS, -(-max_length // usual))
    even_parts = max(1, min(most, at_once // rows))  # where all rows are of one length
    if is_large:
        wanted = TILE if even_parts <= 2 else SHORT_TILE
    else:
        # With one part per row and at most two programs per processor, larger tiles keep more loads in flight.
        wanted = 2 * usual if even_parts == 1 and rows * kv_heads <= 2 * processors else usual
    tile = fitting_tile(wanted, group_pad, dim_block * element_bytes, shared)
    warps = _num_warps(tile, dim_block)
    if dim_block <= NARROW:  # a short window is one tile
        tile = min(tile, max(SHORT_TILE, 1 << (max_length - 1).bit_length()))
    division = KeyDivision.of(rows, at_once, most, tile)
    return DecodePlan(division, warps, holds=not is_large, joins=is_large and most > 1)


def fitting_tile(wanted: int, group_pad: int, head_bytes: int, shared: SharedMemory) -> int:
    """Positions per tile: shared memory holds their keys and values, and twice the queries, of `head_bytes` each."""
    tile = wanted
    while tile > 16 and not shared.holds(2 * (tile + max(16, group_pad)) * head_bytes + QUERY_BYTES):
        tile //= 2
    return tile


def _num_warps(tile: int, dim_block: int) -> int:
    if dim_block >= LARGE:
        return LARGE_WARPS if dim_block < WIDE else WIDE_WARPS
    return max(1, tile // (SHORT_TILE * (1 + (dim_block <= NARROW))))
