"""Llama 1 to 3.3 and models of the same shape (SmolLM2): attention and a gated feed-forward block in every layer.

Other families change one of these methods each. SmolLM3 and Seed-OSS are a few lines away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from cortex.neuron.layers.configs import AttentionConfig, MLPConfig, MoEConfig, RopeConfig
from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.config import count_in, layer_type_in, read_rope
from cortex.neuron.models.errors import UnsupportedModel
from cortex.neuron.models.sharding import MixerConfig

ATTENTION_TYPES = ("full_attention", "sliding_attention")


class Llama(Architecture):
    def mixer(self, index: int) -> MixerConfig:
        return self.attention(index)

    def attention(self, index: int) -> AttentionConfig:
        """The attention of one layer."""
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
            window=self.window(index),
        )

    def rope(self, index: int) -> RopeConfig | None:
        """How one layer rotates positions; None: it does not."""
        del index
        return read_rope(self.raw, self.config.head_dim)

    def window(self, index: int) -> int | None:
        """The positions that a token of one layer attends to; None: all."""
        del index
        return None

    def feed_forward(self, index: int) -> MLPConfig | MoEConfig:
        """The feed-forward block of one layer."""
        del index
        inner = count_in(self.raw, "intermediate_size")
        bias = bool(self.raw.get("mlp_bias", False))
        return MLPConfig(self.config.hidden, inner, bias=bias, output_bias=bias, activation=self.config.activation)

    def attention_type(self, index: int, interval: int = 1) -> str:
        """As `layer_types` has it. Without the list every layer has a window, except each `interval`-th one."""
        default = "sliding_attention" if (index + 1) % interval else "full_attention"
        return layer_type_in(self.raw, index, ATTENTION_TYPES, default)


class SmolLM3(Llama):
    """Every few layers, one does not encode positions."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rope_theta": 2_000_000.0,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
    }

    def rope(self, index: int) -> RopeConfig | None:
        return super().rope(index) if self._has_rope(index) else None

    def window(self, index: int) -> int | None:
        if not self.raw.get("use_sliding_window") or self.raw.get("sliding_window") is None:
            return None
        default = "full_attention" if self._has_rope(index) else "sliding_attention"
        is_windowed = layer_type_in(self.raw, index, ATTENTION_TYPES, default) == "sliding_attention"
        return count_in(self.raw, "sliding_window") if is_windowed else None

    def _has_rope(self, index: int) -> bool:
        listed = self.raw.get("no_rope_layers")
        if listed is None:
            return bool((index + 1) % count_in(self.raw, "no_rope_layer_interval"))
        if len(listed) < self.config.num_layers:
            raise UnsupportedModel(f"no_rope_layers has {len(listed)} values for {self.config.num_layers} layers")
        return bool(listed[index])


class SeedOss(Llama):
    """Biases on queries, keys and values, and a switch of its own for that of the output."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524_288,
        "attention_bias": True,
    }

    def attention(self, index: int) -> AttentionConfig:
        return replace(super().attention(index), output_bias=bool(self.raw.get("attention_out_bias", False)))
