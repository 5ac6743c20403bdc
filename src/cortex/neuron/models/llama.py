"""Llama 1 to 3.3 and models of the same shape (SmolLM2): attention and a gated feed-forward block in every layer."""

from __future__ import annotations

from cortex.neuron.layers.configs import AttentionConfig, GatedDeltaConfig, MLPConfig, MoEConfig
from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.config import count_in


class Llama(Architecture):
    def mixer(self, index: int) -> AttentionConfig | GatedDeltaConfig:
        return self.attention(index)

    def attention(self, index: int) -> AttentionConfig:
        """The attention of one layer; every Llama layer has the same."""
        del index
        config = self.config
        bias = bool(self.raw.get("attention_bias", False))
        return AttentionConfig(
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            norm_eps=config.norm_eps,
            bias=bias,
            output_bias=bias,
        )

    def feed_forward(self, index: int) -> MLPConfig | MoEConfig:
        """The feed-forward block of one layer; every Llama layer has the same."""
        del index
        inner = count_in(self.raw, "intermediate_size")
        bias = bool(self.raw.get("mlp_bias", False))
        return MLPConfig(self.config.hidden, inner, bias=bias, output_bias=bias)
