"""What sequences are kept in on the device: pages of KV, and slots of recurrent state where the model has them."""

from __future__ import annotations

import torch

from cortex.neuron.engine.memory.kv_cache import KVCache
from cortex.neuron.engine.memory.state_slots import StateSlots
from cortex.neuron.engine.memory.states import StateMemory
from cortex.neuron.models.decoder import Decoder


class SequenceMemory:
    """Belongs to the engine thread. Its sizes are fixed; the memory itself can be given back and taken again, empty."""

    def __init__(
        self,
        model: Decoder,
        num_pages: int,
        page_tokens: int,
        slots: StateSlots,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.slots = slots
        self.num_bytes = 0
        self.states: StateMemory | None = None
        """None for a model without recurrent layers."""
        self._model = model
        self._dtype = dtype
        self._device = device
        self.allocate()

    def allocate(self) -> None:
        """Takes the memory and gives each layer its share."""
        model = self._model
        kv = KVCache(model.attentions, self.num_pages, self.page_tokens, self._dtype, self._device)
        self.num_bytes = kv.num_bytes
        if model.gated_deltas:
            self.states = StateMemory(model.gated_deltas, self.slots.num_slots, self._dtype, self._device)
            self.num_bytes += self.states.num_bytes

    def release(self) -> None:
        """Lets go of all of it, whether or not `allocate` came to its end. No layer can run until it is back."""
        self.states = None
        for attention in self._model.attentions:
            vars(attention).pop("cache", None)
        for layer in self._model.gated_deltas:
            vars(layer).pop("state", None)
