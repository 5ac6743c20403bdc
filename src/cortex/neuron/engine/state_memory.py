"""The memory behind the rows' recurrent states, and behind the checkpoints taken of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cortex.neuron.kernels.gated_delta_rules import DeltaState
from cortex.neuron.layers.gated_delta import GatedDelta

STATE_SHARE = 4
"""One part in so many of the memory that the weights leave goes to states, the rest to pages."""
MAX_CHECKPOINTS = {"cuda": 1024, "cpu": 32}


def state_bytes(layers: Sequence[GatedDelta], dtype: torch.dtype) -> int:
    """What one slot costs over all layers."""
    return sum(
        layer.rules.conv_weight.numel() * dtype.itemsize
        + layer.rules.value_size * layer.rules.key_dim * torch.float32.itemsize
        for layer in layers
    )


@dataclass(frozen=True, slots=True)
class StateSlots:
    """How many slots there are: one for each row that runs, one for padding rows, and the checkpoints."""

    rows: int
    checkpoints: int = 0
    num_bytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def num_slots(self) -> int:
        return self.rows + 1 + self.checkpoints

    @classmethod
    def plan(
        cls,
        layers: Sequence[GatedDelta],
        max_rows: int,
        spare_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> StateSlots:
        """Half of the states' share of `spare_bytes` goes to rows, as many as are wanted, the rest to checkpoints."""
        if not layers:
            return cls(max_rows)
        cost = state_bytes(layers, dtype)
        affordable = max(0, spare_bytes) // STATE_SHARE // cost
        rows = max(1, min(max_rows, affordable // 2))
        checkpoints = max(0, min(MAX_CHECKPOINTS[device.type], affordable - rows - 1))
        notes = (f"{rows} of {max_rows} sequences at once: memory for recurrent states",) if rows < max_rows else ()
        return cls(rows, checkpoints, (rows + 1 + checkpoints) * cost, notes)


class StateMemory:
    """Slots that each hold the state of all layers after some prefix of a sequence, and gives each layer its share.

    The first slots belong to the rows (and one more to the padding rows of captured graphs), the rest hold checkpoints.
    """

    def __init__(self, layers: Sequence[GatedDelta], num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_bytes = num_slots * state_bytes(layers, dtype)
        rules = layers[0].rules
        # Not cleared: a row that starts at position 0 does not read what its slot held before.
        self._recent = torch.empty((num_slots, len(layers), *rules.conv_weight.shape), dtype=dtype, device=device)
        shape = (num_slots, len(layers), rules.value_heads, rules.key_dim, rules.value_dim)
        self._memory = torch.empty(shape, dtype=torch.float32, device=device)
        for index, layer in enumerate(layers):
            layer.state = DeltaState(self._recent[:, index], self._memory[:, index])

    def copy(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copies slots, (from, to) each, in the order of the device's work."""
        for source, target in moves:
            self._recent[target].copy_(self._recent[source])
            self._memory[target].copy_(self._memory[source])
