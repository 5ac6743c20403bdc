"""What the engine asks of a model, whichever backend runs it: the decoder here, or a library's modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from cortex.neuron.kernels.attention.rules import AttentionRules
from cortex.neuron.kernels.batch import Batch
from cortex.neuron.layers.attention import LayerCache
from cortex.neuron.layers.configs import AttentionConfig
from cortex.neuron.layers.gated_delta import GatedDelta
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.config import DecoderConfig


class CachedAttention(Protocol):
    """The attention of a layer, which keeps keys and values in pages."""

    config: AttentionConfig
    rules: AttentionRules
    cache: LayerCache
    """Set by the engine before the first step."""


class Model(Protocol):
    """A model on one device, or this rank's share of it. Belongs to the engine thread."""

    architecture: Architecture
    config: DecoderConfig
    parameters: Parameters

    @property
    def attentions(self) -> Sequence[CachedAttention]:
        """Those of the layers that keep KV, in order."""

    @property
    def gated_deltas(self) -> Sequence[GatedDelta]:
        """The layers that keep a state of fixed size for every row, in order."""

    def storages(self) -> list[torch.UntypedStorage]:
        """The device memory that the model holds for as long as it is loaded: weights and tables, each piece once."""

    def __call__(self, batch: Batch) -> Tensor:
        """The hidden states of the step's tokens, from which `logits` are computed: [tokens, hidden]"""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden] → [rows, vocab]"""
