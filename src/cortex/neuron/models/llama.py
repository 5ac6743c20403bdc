"""Llama 1 to 3.3 and models of the same shape (SmolLM2): attention and a gated feed-forward block in every layer.

Other families change what `attention` and `feed_forward` return, one option at a time.
"""

from __future__ import annotations

from cortex.neuron.layers.configs import AttentionConfig, GatedDeltaConfig, MLPConfig, MoEConfig, RopeConfig
from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.config import count_in, read_rope


class Llama(Architecture):
    def mixer(self, index: int) -> AttentionConfig | GatedDeltaConfig:
        return self.attention(index)

    def attention(self, index: int) -> AttentionConfig:
        """The attention of one layer; every Llama layer has the same."""
        config = self.config
        bias = bool(self.raw.get("attention_bias", False))
        return AttentionConfig(
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            rope=self.rope(index),
            bias=bias,
            output_bias=bias,
        )

    def rope(self, index: int) -> RopeConfig | None:
        """How one layer rotates positions; every Llama layer does the same."""
        del index
        return read_rope(self.raw, self.config.head_dim)

    def feed_forward(self, index: int) -> MLPConfig | MoEConfig:
        """The feed-forward block of one layer; every Llama layer has the same."""
        del index
        inner = count_in(self.raw, "intermediate_size")
        bias = bool(self.raw.get("mlp_bias", False))
        return MLPConfig(self.config.hidden, inner, bias=bias, output_bias=bias, activation=self.config.activation)
