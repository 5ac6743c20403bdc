"""Steps of decode and prefill rows for the kernels of recurrent layers."""

from dataclasses import replace

import torch

from cortex.neuron.kernels.batch import PREFILL_TILE, Batch, PrefillRow


def make_batch(
    decode_positions: list[int], prefills: list[tuple[int, int]], device: torch.device, cuts: tuple[int, ...] = ()
) -> Batch:
    """`prefills`: (start, count) of each prefill row. `cuts`: of each prefill row, 0 for none. Rows and cuts get random
    slots; two slots stay unused."""
    cuts = cuts or (0,) * len(prefills)
    lengths = [*(position + 1 for position in decode_positions), *(start + count for start, count in prefills)]
    decodes = len(decode_positions)
    order = torch.randperm(len(lengths) + len(cuts) - cuts.count(0) + 2)
    rows, free = order[: len(lengths)], iter(order[len(lengths) :].tolist())
    offsets, tiles, listed = [0], [], []
    for number, ((start, count), cut) in enumerate(zip(prefills, cuts, strict=True)):
        row, slot = int(rows[decodes + number]), next(free) if cut else 0
        listed.append(PrefillRow(row, start, count, decodes + offsets[-1], cut, slot))
        tiles += [(number, first) for first in range(0, count, PREFILL_TILE)]
        offsets.append(offsets[-1] + count)
    positions = [torch.tensor(decode_positions, dtype=torch.int64)]
    positions += [torch.arange(start, start + count) for start, count in prefills]
    return Batch(
        tokens=torch.empty(0),
        positions=torch.cat(positions).to(device),
        slots=torch.empty(0),
        rows=rows.to(device),
        lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        page_table=torch.empty(0),
        num_decodes=decodes,
        max_length=max(lengths),
        prefills=tuple(listed),
        prefill_offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
        prefill_tiles=torch.tensor(tiles[::-1], dtype=torch.int32, device=device).reshape(-1, 2),
        prefill_cuts=torch.tensor([(row.cut, row.slot) for row in listed], dtype=torch.int32, device=device),
    )


def saved_slots(batch: Batch) -> list[int]:
    """The slots that get the states at the cuts."""
    return [row.slot for row in batch.prefills if row.cut]


CUT_PREFILLS = [
    ([(0, 130)], (64,)),
    ([(0, 128)], (97,)),
    ([(32, 1), (0, 7), (300, 129), (63, 130)], (0, 1, 1, 0)),
    ([(2, 65), (1, 200), (0, 66)], (2, 127, 65)),
]
"""Prefill rows, (start, count) of each, and where they are cut."""


FEW_TOKENS = [[(5, 3)], [(200, 8)], [(70, 4), (0, 9), (1, 2), (2, 1), (31, 5)]]
"""Tokens of sequences in a step that checks drafts: (start, count) of each."""


def as_decode_rows(tokens: list[tuple[int, int]], device: torch.device) -> Batch:
    """The step in which each token of these sequences is a decode row."""
    batch = make_batch([], tokens, device)
    rows = batch.rows.repeat_interleave(torch.tensor([count for _, count in tokens], device=device))
    return replace(batch, rows=rows, num_decodes=len(rows), prefills=(), shares_rows=True)
