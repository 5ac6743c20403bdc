"""Llama 1 to 3.3 and what follows its shape (SmolLM2): pre-norm attention and gated feed-forward."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.layers.attention import Attention, AttentionConfig
from cortex.neuron.layers.mlp import MLP
from cortex.neuron.layers.norm import RMSNorm
from cortex.neuron.models.decoder import Decoder


class FeedForward(Protocol):
    def __call__(self, hidden: Tensor, norm: RMSNorm) -> Tensor:
        """hidden: [tokens, hidden] → hidden + feed_forward(norm(hidden))"""


class LlamaLayer:
    def __init__(self, model: Decoder, attention: AttentionConfig, mlp: FeedForward, prefix: str) -> None:
        parameters, config = model.parameters, model.config
        self.attention_norm = RMSNorm(parameters, config.hidden, config.norm_eps, f"{prefix}.input_layernorm.weight")
        self.attention = Attention(parameters, attention, model.rope, f"{prefix}.self_attn")
        self.mlp_norm = RMSNorm(parameters, config.hidden, config.norm_eps, f"{prefix}.post_attention_layernorm.weight")
        self.mlp = mlp

    def __call__(self, hidden: Tensor, batch: Batch) -> Tensor:
        hidden = self.attention(hidden, self.attention_norm, batch)
        return self.mlp(hidden, self.mlp_norm)


class Llama(Decoder):
    layers: list[LlamaLayer]

    def layer(self, index: int, prefix: str) -> LlamaLayer:
        return LlamaLayer(self, self.attention_config(index), self.feed_forward(index, f"{prefix}.mlp"), prefix)

    def attention_config(self, index: int) -> AttentionConfig:
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

    def feed_forward(self, index: int, prefix: str) -> FeedForward:
        """The second half of one layer; every Llama layer has the same."""
        del index
        config = self.config
        return MLP(self.parameters, config.hidden, config.inner, prefix, bias=bool(self.raw.get("mlp_bias", False)))

    @property
    def attentions(self) -> list[Attention]:
        return [layer.attention for layer in self.layers]
