"""The frame that all families share: embeddings, a stack of layers, a last norm, a head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.layers.attention import Attention
from cortex.neuron.layers.embedding import Embedding, Head
from cortex.neuron.layers.gated_delta import GatedDelta
from cortex.neuron.layers.norm import RMSNorm
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.layers.rope import RopeTable
from cortex.neuron.models.config import DecoderConfig


class Layer(Protocol):
    def __call__(self, hidden: Tensor, batch: Batch) -> Tensor:
        """hidden: [tokens, hidden] → [tokens, hidden], the residual stream before and after this layer."""


class Decoder(ABC):
    """A model as the engine sees it. Built on the `meta` device it takes no memory and only knows its sizes."""

    prefix: ClassVar[str] = "model"
    """Where the checkpoint keeps the decoder's tensors."""
    zero_centred_norm: ClassVar[bool] = False

    def __init__(self, raw: Mapping[str, Any], parameters: Parameters, num_positions: int) -> None:
        """`num_positions`: the longest sequence this instance will see."""
        self.raw = raw
        self.config = DecoderConfig.read(raw)
        self.parameters = parameters
        self.notes: tuple[str, ...] = ()
        config, prefix = self.config, self.prefix
        self.rope = RopeTable(config.rope, num_positions, parameters.device)
        self.embedding = Embedding(parameters, config.vocab, config.hidden, f"{prefix}.embed_tokens.weight")
        self.layers: Sequence[Layer] = [
            self.layer(index, f"{prefix}.layers.{index}") for index in range(config.num_layers)
        ]
        self.norm = RMSNorm(
            parameters, config.hidden, config.norm_eps, f"{prefix}.norm.weight", zero_centred=self.zero_centred_norm
        )
        self.head = Head(parameters, config.vocab, config.hidden, "lm_head", self.embedding if config.tied else None)

    @abstractmethod
    def layer(self, index: int, prefix: str) -> Layer:
        """Builds one layer, allocating from `self.parameters`."""

    @property
    @abstractmethod
    def attentions(self) -> list[Attention]:
        """The layers' attentions that keep KV, in order."""

    @property
    def gated_deltas(self) -> list[GatedDelta]:
        """The layers' gated delta nets, which keep a state of fixed size for every row, in order."""
        return []

    def storages(self) -> list[torch.UntypedStorage]:
        """The device memory that the model holds for as long as it is loaded: weights and tables, each piece once."""
        return [*self.parameters.storages(), self.rope.table.untyped_storage()]

    def __call__(self, batch: Batch) -> Tensor:
        """The residual stream after the last layer: [tokens, hidden]"""
        hidden = self.embedding(batch.tokens)
        for layer in self.layers:
            hidden = layer(hidden, batch)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden] → [rows, vocab]"""
        return self.head.logits(hidden, self.norm)
