"""One layer of a model, as its config describes it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cortex.neuron.layers.configs import MLPConfig, MoEConfig, NormConfig, PerLayerInputConfig, Shard
from cortex.neuron.models.sharding import MixerConfig, sharded_experts, sharded_feed_forward, sharded_mixer


@dataclass(frozen=True, slots=True)
class BlockNorms:
    """The norms of a block, by their names in the layer; None: there is none. The norm after a block is applied before
    the addition to the residual stream."""

    before: str | None = None
    after: str | None = None
    after_eps: float | None = None
    """The norm after the block has it; None: it has that of the layer's norms."""

    @property
    def names(self) -> list[str]:
        return [name for name in (self.before, self.after) if name is not None]


EXPERT_NORMS = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
"""The norms of a layer with experts parallel to its feed-forward block: after the block, before the experts, after."""


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """A mixer over the tokens of a sequence, then a feed-forward block for each token. One of them may be missing."""

    mixer: MixerConfig | None
    feed_forward: MLPConfig | MoEConfig | None
    norm: NormConfig
    """It applies to all norms of the layer over the residual stream."""
    mixer_norms: BlockNorms
    feed_forward_norms: BlockNorms
    """None of its own: the feed-forward block has the same input as the mixer, and both are added."""
    experts: MoEConfig | None = None
    """Experts parallel to the feed-forward block, with norms of their own: `EXPERT_NORMS`."""
    per_layer_input: PerLayerInputConfig | None = None
    """What follows the feed-forward block, in models whose layers have inputs of their own."""
    has_factor: bool = False
    """Whether the residual stream after the layer is multiplied by a number of the checkpoint, `layer_scalar`."""

    def sharded(self, shard: Shard) -> LayerConfig:
        mixer = None if self.mixer is None else sharded_mixer(self.mixer, shard)
        block = None if self.feed_forward is None else sharded_feed_forward(self.feed_forward, shard)
        experts = None if self.experts is None else sharded_experts(self.experts, shard)
        return replace(self, mixer=mixer, feed_forward=block, experts=experts)

    @property
    def is_parallel(self) -> bool:
        return self.feed_forward is not None and not self.feed_forward_norms.names
