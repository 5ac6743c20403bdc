"""Token embeddings and the head that turns hidden states into logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.matrix import Matrix
from cortex.neuron.layers.configs import Shard
from cortex.neuron.layers.linear import Linear
from cortex.neuron.layers.norm import RMSNorm
from cortex.neuron.layers.parameters import Parameters

NEAR_TIE = 2.0**-6
"""Relative to the highest logit: half precision may have swapped logits that differ by less."""
MAX_NEAR_TIES = 64
"""Average number of near ties per row up to which they are recomputed. Beyond it, no token is clearly preferred."""


class Embedding:
    """The embeddings of all tokens; on a rank of a divided model, of its share of the vocabulary."""

    def __init__(self, parameters: Parameters, vocab: int, size: int, source: str) -> None:
        self.source = source
        self._group = parameters.group
        self._held = self._group.shard.part(vocab)
        self._dtype = parameters.dtype
        self.matrix = parameters.matrix({source: len(self._held)}, size)

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens: [tokens] → [tokens, size]"""
        if self._group.shard.is_whole:
            return self._rows(tokens)
        own = tokens - self._held.start
        elsewhere = (own < 0) | (own >= len(self._held))
        return self._group.all_reduce(self._rows(own.masked_fill(elsewhere, 0)).masked_fill_(elsewhere[:, None], 0))

    def _rows(self, ids: Tensor) -> Tensor:
        return self.matrix.rows(ids, self._dtype)


class Head(Linear):
    """The output matrix. `tied`: a matrix that it is, such as that of the embedding. A rank of a divided model has the
    rows of its share of the vocabulary; `logits` are those of all tokens."""

    def __init__(self, parameters: Parameters, vocab: int, size: int, source: str, tied: Matrix | None) -> None:
        self._vocab = vocab
        self._group = parameters.group
        self._held = self._group.shard.part(vocab)
        rows = len(self._held)
        if tied is None:
            super().__init__(parameters, size, {source: rows})
        else:
            self.inputs, self.splits, self.matrix, self.bias = size, [rows], tied, None

    def logits(self, hidden: Tensor, norm: RMSNorm) -> Tensor:
        """hidden: [rows, hidden] → [rows, vocab]

        On a CPU in half precision, which rounds the highest logits to eighths and quarters, near ties are recomputed in
        float32. Otherwise the response to a prompt would depend on whether the prompt is cached.
        """
        if self.matrix.takes_float32:
            hidden = hidden.float()
        logits = self._gathered(self(hidden, norm=norm))
        if not logits.is_cpu or not self.matrix.rounds(hidden.dtype):
            return logits
        logits = logits.float()
        highest = logits.amax(-1, keepdim=True)
        rows, tokens = (logits >= highest - highest.abs() * NEAR_TIE).nonzero(as_tuple=True)
        if len(rows) == len(logits) or len(rows) > MAX_NEAR_TIES * len(logits):
            return logits
        logits[rows, tokens] = self._exact(norm(hidden.float())[rows], tokens)
        return logits

    def _exact(self, inputs: Tensor, tokens: Tensor) -> Tensor:
        """The products of each input with the row of its token, in float32. inputs: [n, hidden], tokens: [n] → [n]"""
        own = tokens - self._held.start
        elsewhere = (own < 0) | (own >= len(self._held))
        weights = self.matrix.rows(own.masked_fill(elsewhere, 0), torch.float32)
        return self._group.all_reduce(torch.einsum("ni,ni->n", weights, inputs).masked_fill_(elsewhere, 0))

    def _gathered(self, logits: Tensor) -> Tensor:
        """[rows, this rank's tokens] → [rows, vocab]"""
        shard = self._group.shard
        if shard.is_whole:
            return logits
        sizes = [len(Shard(rank, shard.size).part(self._vocab)) for rank in range(shard.size)]
        every = self._group.all_gather(F.pad(logits, (0, max(sizes) - len(self._held))))
        if min(sizes) == max(sizes):
            return every
        parts = zip(every.split(max(sizes), dim=-1), sizes, strict=True)
        return torch.cat([part[:, :size] for part, size in parts], dim=-1)
