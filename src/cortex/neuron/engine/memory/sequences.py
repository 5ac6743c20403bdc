"""The device memory of sequences: pages of KV, and slots of recurrent state for models that have one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from cortex.neuron.engine.kv.page_groups import Window
from cortex.neuron.engine.memory.plan import StateSlots
from cortex.neuron.engine.scheduling.step_plan import PageCopy, StateCopy
from cortex.neuron.layers.attention import CachedAttention, LayerCache
from cortex.neuron.layers.configs import LatentAttentionConfig
from cortex.neuron.layers.recurrent.layers import RecurrentLayer
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
        self.blocks: list[list[Tensor]] = []
        """All of the memory, as [parts, blocks, ...]: the pages of each KV group, then the slots of states. The pages
        of a draft model are in the first group, whose page ids they have."""
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
        self.blocks = kv.blocks
        if self._draft is not None:
            count = next(iter(self.num_pages.values()))
            pages = dict.fromkeys(self._draft.architecture.windows, count)
            own = KVCache(self._draft.attentions, pages, self.page_tokens, self._kv_dtype, self._device)
            self.num_bytes += own.num_bytes
            self.blocks[0] += [tensor for tensors in own.blocks for tensor in tensors]
        if model.recurrent_layers:
            self.states = StateMemory(model.recurrent_layers, self.slots.num_slots, self._dtype, self._device)
            self.num_bytes += self.states.num_bytes
            self.blocks.append([memory.unsqueeze(0) for memory in self.states.tensors if memory.numel()])

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copies pages in all layers of their groups, in the order of the device's work."""
        for group, source, destination in copies:
            for memory in self.blocks[group]:
                memory[:, destination].copy_(memory[:, source])

    def release(self) -> None:
        """Frees the memory, even after an `allocate` that raised. No layer can run until it is allocated again."""
        self.states = None
        self.blocks = []
        for attention in (*self._model.attentions, *(() if self._draft is None else self._draft.attentions)):
            vars(attention).pop("cache", None)
        for layer in self._model.recurrent_layers:
            vars(layer).pop("state", None)


class NoSequences(SequenceMemory):
    """The sequence memory of a model that pools whole texts: none."""

    def __init__(self, slots: StateSlots) -> None:
        self.num_pages = {}
        self.page_tokens = 0
        self.slots = slots
        self.num_bytes = 0
        self.states = None
        self.blocks = []

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
        self.blocks: list[list[Tensor]] = [[] for _ in groups]
        """For each KV group: what layers of one shape have, [tensors, pages, page_tokens, heads, head_dim]."""
        alike: dict[tuple[Window, int, int, int], list[CachedAttention]] = {}
        for attention in attentions:
            config = attention.config
            if config.owns_kv:
                # The values of latent attention are a part of its keys.
                num_tensors = 1 if isinstance(config, LatentAttentionConfig) else 2
                alike.setdefault((config.window, config.kv_heads, config.head_dim, num_tensors), []).append(attention)
        for (window, heads, width, num_tensors), layers in alike.items():
            shape = (len(layers) * num_tensors, num_pages[window], page_tokens, heads, width)
            memory = _zeros(shape, dtype, device)
            group = groups.index(window)
            self.blocks[group].append(memory)
            for attention, tensors in zip(layers, memory.split(num_tensors), strict=True):
                attention.cache = LayerCache(tensors[0], tensors[-1], group)
            self.num_bytes += memory.nbytes


class StateMemory:
    """Slots that each hold the state of all layers after some prefix of a sequence; gives each layer its share.

    The first slots belong to the rows, the next one to the padding rows of captured graphs, the rest to checkpoints.
    """

    def __init__(
        self, layers: Sequence[RecurrentLayer], num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        parts = [(layer, index, part) for layer in layers for index, part in enumerate(layer.config.state)]
        self.tensors: list[Tensor] = []
        """The states in each of the dtypes, [slots, elements]: all of a slot in one dtype is copied at once."""
        views: dict[RecurrentLayer, dict[int, Tensor]] = {layer: {} for layer in layers}
        for is_float32 in (False, True):
            chosen = [each for each in parts if each[2].is_float32 == is_float32]
            sizes = [math.prod(part.shape) for _, _, part in chosen]
            # Not cleared: a row that starts at position 0 does not read the earlier content of its slot.
            shape = (num_slots, sum(sizes))
            memory = torch.empty(shape, dtype=torch.float32 if is_float32 else dtype, device=device)
            self.tensors.append(memory)
            for (layer, index, part), view in zip(chosen, memory.split(sizes, dim=1), strict=True):
                views[layer][index] = view.unflatten(1, part.shape)
        self.num_bytes = sum(memory.nbytes for memory in self.tensors)
        for layer, state in views.items():
            layer.state = tuple(state[index] for index in range(len(state)))

    def copy(self, copies: Sequence[StateCopy]) -> None:
        """Copies slots, (source, destination) each, in the order of the device's work."""
        for source, destination in copies:
            for memory in self.tensors:
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
