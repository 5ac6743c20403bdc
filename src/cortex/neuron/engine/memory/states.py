"""The memory behind the rows' recurrent states, and behind the checkpoints taken of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cortex.neuron.kernels.delta.rules import DeltaState
from cortex.neuron.layers.gated_delta import GatedDelta


class StateMemory:
    """Slots that each hold the state of all layers after some prefix of a sequence, and gives each layer its share.

    The first slots belong to the rows (and one more to the padding rows of captured graphs), the rest hold checkpoints.
    """

    def __init__(self, layers: Sequence[GatedDelta], num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        rules = layers[0].rules
        # Not cleared: a row that starts at position 0 does not read what its slot held before.
        self._recent = torch.empty((num_slots, len(layers), *rules.conv_weight.shape), dtype=dtype, device=device)
        shape = (num_slots, len(layers), rules.value_heads, rules.key_dim, rules.value_dim)
        self._memory = torch.empty(shape, dtype=torch.float32, device=device)
        self.num_bytes = self._recent.nbytes + self._memory.nbytes
        for index, layer in enumerate(layers):
            layer.state = DeltaState(self._recent[:, index], self._memory[:, index])

    def copy(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copies slots, (from, to) each, in the order of the device's work."""
        for source, target in moves:
            self._recent[target].copy_(self._recent[source])
            self._memory[target].copy_(self._memory[source])
