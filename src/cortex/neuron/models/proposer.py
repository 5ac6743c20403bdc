"""What drafts tokens on the device: the head of a model, or a smaller model with the same vocabulary."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.layers.parallel import ParallelGroup


class Proposer(Protocol):
    """Follows the steps of a model and continues their sequences. It has KV pages of its own under the page ids of the
    model's first KV group. What it carries from one token to the next is a row of a matrix."""

    starts_from_hidden: bool
    """Whether what `absorb` returns at a position predicts the token after the one that follows it. Otherwise the first
    draft token comes from an `extend` by the token that follows."""

    @property
    def carried_size(self) -> int:
        """The columns of what is carried."""
        ...

    @property
    def group(self) -> ParallelGroup:
        """The ranks that compute it together."""
        ...

    def absorb(self, following: Tensor, hidden: Tensor, batch: Batch) -> Tensor:
        """Computes the tokens of a step that the model has computed: `hidden` are the model's residual streams after
        its last layer, `following` the tokens after those of the batch. [tokens, hidden] → what is carried, [tokens,
        size]"""
        ...

    def extend(self, tokens: Tensor, carried: Tensor, batch: Batch) -> Tensor:
        """Computes one more token of each row. tokens: [rows], carried: [rows, size] → carried [rows, size]"""
        ...

    def logits(self, carried: Tensor) -> Tensor:
        """[rows, size] → [rows, vocab]"""
        ...
