"""What a model is made of, read from its config: the layers, their sizes and their options.

Imports no torch. The decoder is built from it, and its size is computed from it, so that both follow from one
description.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from cortex.neuron.layers.configs import WHOLE, AttentionConfig, GatedDeltaConfig, MLPConfig, MoEConfig, Shard
from cortex.neuron.models.config import DecoderConfig
from cortex.neuron.models.sharding import (
    Slices,
    feed_forward_slices,
    mixer_slices,
    sharded_feed_forward,
    sharded_mixer,
)
from cortex.neuron.weights.sharded import TensorSlice


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """A mixer over the tokens of a sequence, then a feed-forward block for each token."""

    mixer: AttentionConfig | GatedDeltaConfig
    feed_forward: MLPConfig | MoEConfig

    def sharded(self, shard: Shard) -> LayerConfig:
        return LayerConfig(sharded_mixer(self.mixer, shard), sharded_feed_forward(self.feed_forward, shard))


class Architecture(ABC):
    """One model of a family. Immutable once built.

    Raises UnsupportedModel from its constructor for a config that is incomplete or asks for what is not built.
    """

    prefix: ClassVar[str] = "model"
    """Where the checkpoint keeps the decoder's tensors."""
    zero_centred_norm: ClassVar[bool] = False
    """Whether the layers' norms are stored as their distance from one."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Values of options that the family's configs leave out."""
    notes: ClassVar[tuple[str, ...]] = ()
    """What a user should know about every model of this family."""

    shard: Shard = WHOLE
    """Whose layers these are: one rank's of a divided model, or all of them."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = {**self.defaults, **raw}
        self.config = DecoderConfig.read(self.raw)
        self.layers = tuple(
            LayerConfig(self.mixer(index), self.feed_forward(index)) for index in range(self.config.num_layers)
        )

    def sharded(self, shard: Shard) -> Architecture:
        """What one rank has of this model: `config` describes the whole model, `layers` this rank's share.

        Raises UnsupportedModel if the model cannot be divided so.
        """
        part = copy.copy(self)
        part.shard = shard
        part.layers = tuple(layer.sharded(shard) for layer in self.layers)
        return part

    def tensor_slices(self, shard: Shard) -> Slices:
        """The parts of this whole model's tensors that a rank reads."""
        slices: dict[str, TensorSlice | None] = {}
        for name in (f"{self.prefix}.embed_tokens.weight", "lm_head.weight"):
            slices[name] = TensorSlice(rows=(shard.part(self.config.vocab),))
        for index, layer in enumerate(self.layers):
            slices.update(mixer_slices(layer.mixer, shard, f"{self.prefix}.layers.{index}"))
            slices.update(feed_forward_slices(layer.feed_forward, shard, f"{self.prefix}.layers.{index}"))
        return slices

    @abstractmethod
    def mixer(self, index: int) -> AttentionConfig | GatedDeltaConfig:
        """The first half of a layer."""

    @abstractmethod
    def feed_forward(self, index: int) -> MLPConfig | MoEConfig:
        """The second half of a layer."""
