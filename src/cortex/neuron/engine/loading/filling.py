"""Reads the weights of a checkpoint into the parameters of a model."""

from __future__ import annotations

from collections.abc import Callable

from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.weights.adapter import with_adapter
from cortex.neuron.weights.checkpoint import Checkpoint
from cortex.neuron.weights.transfer import PackedPlacement, PieceSizes, Placement, load_into

Progress = Callable[[str, int, int], None]
"""Called with (stage, bytes done, bytes in total)."""


def fill_from(
    checkpoint: Checkpoint,
    parameters: Parameters,
    progress: Progress,
    cancelled: Callable[[], bool],
    sizes: PieceSizes | None = None,
) -> None:
    """Raises CheckpointError or Cancelled."""
    placements = [
        Placement(
            binding.source,
            binding.destination,
            transform=with_adapter(checkpoint, binding.source, binding.transform),
            shape=binding.shape,
        )
        for binding in parameters.bindings_from(checkpoint.tensors)
    ]
    packed = [
        PackedPlacement(binding.source, binding.matrix, binding.first_row, binding.num_rows)
        for binding in parameters.row_bindings
    ]
    load_into(
        checkpoint,
        placements,
        packed,
        progress=lambda done, total: progress("read", done, total),
        cancelled=cancelled,
        sizes=sizes,
    )
    progress("place", 0, 0)
