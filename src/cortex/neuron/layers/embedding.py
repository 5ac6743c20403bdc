"""Token embeddings and the head that turns hidden states into logits."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.layers.linear import Linear
from cortex.neuron.layers.parameters import Parameters


class Embedding:
    def __init__(self, parameters: Parameters, vocab: int, size: int, source: str) -> None:
        self.source = source
        self.weight = parameters.load(source, vocab, size)

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens: [tokens] → [tokens, size]"""
        return F.embedding(tokens, self.weight)


class Head(Linear):
    """The output matrix; with `tied` it is the embedding's own memory."""

    def __init__(self, parameters: Parameters, vocab: int, size: int, source: str, tied: Embedding | None) -> None:
        if tied is None:
            super().__init__(parameters, size, {source: vocab})
        else:
            self.inputs, self.splits, self.weight, self.bias = size, [vocab], tied.weight, None
            self.four_bit = parameters.four_bit_matrix({tied.source: vocab}, size)
