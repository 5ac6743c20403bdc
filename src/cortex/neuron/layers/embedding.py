"""Token embeddings and the head that turns hidden states into logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.quantised.product import packed_rows
from cortex.neuron.layers.linear import Linear
from cortex.neuron.layers.norm import RMSNorm
from cortex.neuron.layers.packed import PackedProjections
from cortex.neuron.layers.parameters import Parameters

NEAR_TIE = 2.0**-6
"""Relative to the highest logit: half precision may have swapped logits that differ by less."""
MAX_NEAR_TIES = 64
"""Average number of near ties per row up to which they are recomputed. Beyond it, no token is clearly preferred."""


class Embedding:
    def __init__(self, parameters: Parameters, vocab: int, size: int, source: str) -> None:
        self.source = source
        self.packed = parameters.packed({source: vocab}, size)
        self.weight = parameters.load(source, vocab, size) if self.packed is None else parameters.empty(0, size)

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens: [tokens] → [tokens, size]"""
        if self.packed is not None:
            return packed_rows(self.packed[0], tokens, self.weight.dtype)
        return F.embedding(tokens, self.weight)


class Head(Linear):
    """The output matrix. With `tied` it shares the memory of the embedding."""

    def __init__(self, parameters: Parameters, vocab: int, size: int, source: str, tied: Embedding | None) -> None:
        if tied is None:
            super().__init__(parameters, size, {source: vocab})
        else:
            self.inputs, self.splits, self.weight, self.bias = size, [vocab], tied.weight, None
            self.packed = None if tied.packed is None else PackedProjections(tied.packed)
            self.four_bit = None
            if self.packed is None:
                self.four_bit = parameters.four_bit_matrix({tied.source: vocab}, size)

    def logits(self, hidden: Tensor, norm: RMSNorm) -> Tensor:
        """hidden: [rows, hidden] → [rows, vocab]

        On a CPU in half precision, which rounds the highest logits to eighths and quarters, near ties are recomputed in
        float32. Otherwise the response to a prompt would depend on whether the prompt is cached.
        """
        logits = self(hidden, norm=norm)
        if logits.is_cuda or logits.dtype == torch.float32 or self.packed is not None:
            return logits
        logits = logits.float()
        highest = logits.amax(-1, keepdim=True)
        rows, tokens = (logits >= highest - highest.abs() * NEAR_TIE).nonzero(as_tuple=True)
        if len(rows) == len(logits) or len(rows) > MAX_NEAR_TIES * len(logits):
            return logits
        exact = norm(hidden.float())[rows]
        logits[rows, tokens] = torch.einsum("ni,ni->n", self.weight[tokens].float(), exact)
        return logits
