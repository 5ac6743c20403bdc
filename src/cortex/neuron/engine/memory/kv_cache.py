"""The memory behind the pages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cortex.neuron.layers.attention import Attention, LayerCache


class KVCache:
    """Allocates the pages of every layer and gives each attention its own."""

    def __init__(
        self,
        attentions: Sequence[Attention],
        num_pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_bytes = 0
        for attention in attentions:
            shape = (num_pages, page_tokens, attention.config.kv_heads, attention.config.head_dim)
            attention.cache = LayerCache(_zeros(shape, dtype, device), _zeros(shape, dtype, device))
            self.num_bytes += attention.cache.keys.nbytes + attention.cache.values.nbytes


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros rather than garbage: padding rows read the padding page, and masked scores must stay finite.

    On a CPU the kernel zeroes each piece when it is first touched, so that a load does not wait for pages that may
    never be used.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(shape)
