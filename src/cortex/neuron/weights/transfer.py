"""Loads weights from files into the tensors of a model, at bus speed and with bounded use of RAM.

Tensors are read in pieces, so that progress is steady and a cancelled load ends at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from cortex.neuron.weights.checkpoint import Checkpoint
from cortex.neuron.weights.decode import mapped_bytes
from cortex.neuron.weights.errors import Cancelled
from cortex.neuron.weights.finite import finish
from cortex.neuron.weights.placement import (
    PackedPlacement,
    PackedTarget,
    Placement,
    Target,
    WeightPiece,
    checked,
    checked_packed,
)
from cortex.neuron.weights.staging import staged

__all__ = ["PackedPlacement", "Placement", "Progress", "load_into"]

Progress = Callable[[int, int], None]
"""Called with (bytes done, total bytes), on the calling thread. Bytes done never decrease."""


def load_into(
    checkpoint: Checkpoint,
    placements: Sequence[Placement],
    packed: Sequence[PackedPlacement] = (),
    *,
    progress: Progress,
    cancelled: Callable[[], bool],
) -> None:
    """Fill every destination from the checkpoint. All destinations are on one device.

    Raises TensorMissing before any transfer if a name or a shape is wrong, CheckpointError if a file cannot be read or
    a scale is not a number,
    and Cancelled within a tenth of a second after `cancelled()` turns true. After an error the destinations hold
    undefined values. On return, all weights are on the device.
    """
    targets: list[Target | PackedTarget] = [
        *(Target(placement, checked(checkpoint, placement)) for placement in placements),
        *(PackedTarget(placement, checked_packed(checkpoint, placement)) for placement in packed),
    ]
    pieces = [piece for target in targets for piece in target.pieces()]
    total_bytes = sum(piece.num_bytes for piece in pieces)
    devices = {placement.destination.device for placement in placements}
    devices |= {placement.matrix.device for placement in packed}
    if len(devices) > 1:
        raise ValueError(f"destinations are on several devices: {sorted(map(str, devices))}; use one call per device")
    progress(0, total_bytes)
    done_bytes = 0
    device = next(iter(devices), torch.device("cpu"))
    with torch.no_grad():
        arrivals = _mapped(pieces, cancelled) if device.type == "cpu" else staged(pieces, device, cancelled)
        for piece in arrivals:
            done_bytes += piece.num_bytes
            progress(done_bytes, total_bytes)
        finish(target.check for target in targets)


def _mapped(pieces: Sequence[WeightPiece], cancelled: Callable[[], bool]) -> Iterator[WeightPiece]:
    """Write pieces on the CPU, directly from the mapped files."""
    for piece in pieces:
        if cancelled():
            raise Cancelled("the load was cancelled by the caller")
        piece.target.write(piece, mapped_bytes(piece.stored, piece.start_group, piece.num_groups))
        yield piece
