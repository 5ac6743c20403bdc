"""The device memory of sequences: pages of KV, and slots of recurrent state for models that have one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from cortex.neuron.engine.kv_pages import Window
from cortex.neuron.engine.memory.plan import StateSlots
from cortex.neuron.layers.attention import CachedAttention, LayerCache
from cortex.neuron.layers.configs import LatentAttentionConfig
from cortex.neuron.layers.recurrent.layer import RecurrentLayer
from cortex.neuron.models.decoder import Decoder


class SequenceMemory:
    """Belongs to the engine thread. Its sizes are fixed; the memory can be freed and allocated again, empty."""

    def __init__(
        self,
        model: Decoder,
        num_pages: Mapping[Window, int],
        page_tokens: int,
        slots: StateSlots,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
        draft: Decoder | None = None,
    ) -> None:
        """`num_pages`: for each window of the model's layers. `kv_dtype`: of the pages; None: `dtype`. `draft`: the
        draft model, all of whose layers have as many pages as those of the first window."""
        self._draft = draft
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.slots = slots
        self.num_bytes = 0
        self.states: StateMemory | None = None
        """None for a model without recurrent layers."""
        self._model = model
        self._dtype = dtype
        self._kv_dtype = kv_dtype or dtype
        self._device = device
        self.allocate()

    def allocate(self) -> None:
        """Allocates the memory and gives each layer its share."""
        model = self._model
        kv = KVCache(model.attentions, self.num_pages, self.page_tokens, self._kv_dtype, self._device)
        self.num_bytes = kv.num_bytes
        if self._draft is not None:
            count = next(iter(self.num_pages.values()))
            pages = dict.fromkeys(self._draft.architecture.windows, count)
            own = KVCache(self._draft.attentions, pages, self.page_tokens, self._kv_dtype, self._device)
            self.num_bytes += own.num_bytes
        if model.recurrent_layers:
            self.states = StateMemory(model.recurrent_layers, self.slots.num_slots, self._dtype, self._device)
            self.num_bytes += self.states.num_bytes

    def release(self) -> None:
        """Frees the memory, even after an `allocate` that raised. No layer can run until it is allocated again."""
        self.states = None
        for attention in (*self._model.attentions, *(() if self._draft is None else self._draft.attentions)):
            vars(attention).pop("cache", None)
        for layer in self._model.recurrent_layers:
            vars(layer).pop("state", None)


class NoSequences(SequenceMemory):
    """Of a model that computes whole texts and keeps nothing of them."""

    def __init__(self, slots: StateSlots) -> None:
        self.num_pages = {}
        self.page_tokens = 0
        self.slots = slots
        self.num_bytes = 0
        self.states = None

    def allocate(self) -> None:
        pass

    def release(self) -> None:
        pass


class KVCache:
    """Allocates the pages of every layer and gives each attention its own."""

    def __init__(
        self,
        attentions: Sequence[CachedAttention],
        num_pages: Mapping[Window, int],
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`num_pages`: for each window, in the order of the KV groups."""
        self.num_bytes = 0
        groups = list(num_pages)
        for attention in attentions:
            config = attention.config
            if not config.owns_kv:
                continue
            shape = (num_pages[config.window], page_tokens, config.kv_heads, config.head_dim)
            keys = _zeros(shape, dtype, device)
            # The values of latent attention are a part of its keys.
            values = keys if isinstance(config, LatentAttentionConfig) else _zeros(shape, dtype, device)
            attention.cache = LayerCache(keys, values, groups.index(config.window))
            self.num_bytes += shape[0] * page_tokens * config.kv_elements * dtype.itemsize


class StateMemory:
    """Slots that each hold the state of all layers after some prefix of a sequence; gives each layer its share.

    The first slots belong to the rows, the next one to the padding rows of captured graphs, the rest to checkpoints.
    """

    def __init__(
        self, layers: Sequence[RecurrentLayer], num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        parts = [(layer, index, part) for layer in layers for index, part in enumerate(layer.config.state)]
        self._tensors: list[Tensor] = []
        """The states in each of the dtypes, [slots, elements]: all of a slot in one dtype is copied at once."""
        views: dict[RecurrentLayer, dict[int, Tensor]] = {layer: {} for layer in layers}
        for is_float32 in (False, True):
            chosen = [each for each in parts if each[2].is_float32 == is_float32]
            sizes = [math.prod(part.shape) for _, _, part in chosen]
            # Not cleared: a row that starts at position 0 does not read the earlier content of its slot.
            shape = (num_slots, sum(sizes))
            memory = torch.empty(shape, dtype=torch.float32 if is_float32 else dtype, device=device)
            self._tensors.append(memory)
            for (layer, index, part), view in zip(chosen, memory.split(sizes, dim=1), strict=True):
                views[layer][index] = view.unflatten(1, part.shape)
        self.num_bytes = sum(memory.nbytes for memory in self._tensors)
        for layer, state in views.items():
            layer.state = tuple(state[index] for index in range(len(state)))

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies slots, (source, destination) each, in the order of the device's work."""
        for source, destination in copies:
            for memory in self._tensors:
                memory[destination].copy_(memory[source])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros rather than garbage: padding rows read the padding page, and masked scores must stay finite.

    On a CPU the kernel zeroes each piece when it is first touched, so that a load does not wait for pages that may
    never be used.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(shape)
