"""Drafts tokens on the device, with a head of the model or with a smaller model of the same vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.layers.configs import NormConfig
from cortex.neuron.layers.embedding import Head
from cortex.neuron.layers.linear import Linear
from cortex.neuron.layers.norm import RMSNorm
from cortex.neuron.layers.parallel import ParallelGroup
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.models.layer import PredictionConfig


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


class TargetModel(Protocol):
    """The model that a head belongs to."""

    parameters: Parameters
    norm: RMSNorm

    def new_norm(self, norm: NormConfig, source: str) -> RMSNorm: ...
    def embedded(self, tokens: Tensor) -> Tensor: ...


class PredictionHead:
    """A layer of its model, with pages of its own in the model's first KV group. See `Proposer`.

    The KV of a position depends on the token after it. So where a prefix of whole pages is shared, that of the last
    position of the prefix may stem from another continuation. This only affects the acceptance rate of drafts.
    """

    starts_from_hidden = True

    def __init__(
        self,
        model: TargetModel,
        config: PredictionConfig,
        hidden: int,
        layer: Callable[[Tensor, Batch], Tensor],
        output: Head,
    ) -> None:
        """`layer`: the one that `config` describes. `hidden`: the size of hidden states. `output`: to logits."""
        self._output = output
        self.carried_size = hidden
        self.group = model.parameters.group
        self._layer = layer
        self._model = model
        self._carries_norm = config.carries_norm
        names = (config.embedding_norm, config.hidden_norm, config.last_norm)
        self._embedding_norm, self._hidden_norm, self._norm = (
            model.new_norm(config.norm, f"{name}.weight") for name in names
        )
        self._projection = Linear(model.parameters, 2 * hidden, {config.projection: hidden})

    def absorb(self, following: Tensor, hidden: Tensor, batch: Batch) -> Tensor:
        return self._through(following, self._model.norm(hidden), batch)

    def extend(self, tokens: Tensor, carried: Tensor, batch: Batch) -> Tensor:
        return self._through(tokens, self._norm(carried) if self._carries_norm else carried, batch)

    def logits(self, carried: Tensor) -> Tensor:
        return self._output.logits(self._norm.centred(carried), self._norm)

    def _through(self, tokens: Tensor, hidden: Tensor, batch: Batch) -> Tensor:
        embedded = self._embedding_norm(self._model.embedded(tokens))
        inputs = torch.cat((embedded, self._hidden_norm(hidden)), dim=1)
        return self._layer(self._projection(inputs), batch)
