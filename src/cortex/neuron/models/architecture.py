"""What a model is made of, read from its config: the layers, their sizes and their options.

Imports no torch. The decoder is built from it, and its size is computed from it, so that both follow from one
description.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from cortex.neuron.layers.configs import AttentionConfig, GatedDeltaConfig, MLPConfig, MoEConfig
from cortex.neuron.models.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """A mixer over the tokens of a sequence, then a feed-forward block for each token."""

    mixer: AttentionConfig | GatedDeltaConfig
    feed_forward: MLPConfig | MoEConfig


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

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = {**self.defaults, **raw}
        self.config = DecoderConfig.read(self.raw)
        self.layers = tuple(
            LayerConfig(self.mixer(index), self.feed_forward(index)) for index in range(self.config.num_layers)
        )

    @abstractmethod
    def mixer(self, index: int) -> AttentionConfig | GatedDeltaConfig:
        """The first half of a layer."""

    @abstractmethod
    def feed_forward(self, index: int) -> MLPConfig | MoEConfig:
        """The second half of a layer."""
