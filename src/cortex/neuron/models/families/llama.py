"""Llama, and the families with its tensors: SmolLM3, Seed-OSS, Hunyuan, OLMo and EXAONE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from cortex.neuron.layers.configs import AttentionConfig, MLPConfig, MoEConfig, QKNormConfig, RopeConfig
from cortex.neuron.models.architecture import Architecture, Architectures
from cortex.neuron.models.config import (
    UnsupportedModel,
    count_in,
    layer_type_in,
    number_in,
    read_layer_rope,
    read_rope,
    rope_settings,
)
from cortex.neuron.models.layer import BlockNorms, MixerConfig

ATTENTION_TYPES = ("full_attention", "sliding_attention")


class Llama(Architecture):
    """Llama 1 to 3.3 and models of the same shape (SmolLM2): attention and a gated feed-forward block in every layer.

    Other families change one of these methods each. SmolLM3 and Seed-OSS are a few lines away.
    """

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
        return count_in(self.raw, "sliding_window") if self.is_windowed(index) else None

    def is_windowed(self, index: int) -> bool:
        """Whether one layer has a window."""
        del index
        return False

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

    def is_windowed(self, index: int) -> bool:
        if not self.raw.get("use_sliding_window") or self.raw.get("sliding_window") is None:
            return False
        default = "full_attention" if self._has_rope(index) else "sliding_attention"
        return layer_type_in(self.raw, index, ATTENTION_TYPES, default) == "sliding_attention"

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


class HunyuanDense(Llama):
    """Hunyuan, dense: Llama's shape with norms on every query and key head after the rotation."""

    defaults: ClassVar[Mapping[str, Any]] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
    implemented: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "norm_type": ("rms", "hf_rms", None),
        "use_cla": (False, None),
        "use_mla": (False, None),
        "use_qk_norm": (True, None),
        "use_rotary_pos_emb": (True, None),
    }

    def attention(self, index: int) -> AttentionConfig:
        return replace(super().attention(index), qk_norm=QKNormConfig(self.norm, after_rope=True))

    def rope(self, index: int) -> RopeConfig | None:
        """A `dynamic` scaling with a fixed `alpha` is a larger theta."""
        settings = rope_settings(self.raw)
        dim = self.config.head_dim
        if settings.get("rope_type", settings.get("type")) != "dynamic" or not settings.get("alpha") or dim <= 2:
            return super().rope(index)
        theta = number_in(settings if settings.get("rope_theta") else self.raw, "rope_theta", 10_000.0)
        stretched = theta * number_in(settings, "alpha", 1.0) ** (dim / (dim - 2))
        return read_rope(self.raw, dim, {"rope_theta": stretched})


class Olmo2(Llama):
    """OLMo 2 and 3 and EXAONE 4: norms after the blocks in place of those before them.

    OLMo normalises queries and keys over all heads, EXAONE each head. EXAONE's layers without a window do not encode
    positions.
    """

    mixer_norms = BlockNorms(after="post_attention_layernorm")
    feed_forward_norms = BlockNorms(after="post_feedforward_layernorm")
    defaults: ClassVar[Mapping[str, Any]] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}

    def attention(self, index: int) -> AttentionConfig:
        return replace(super().attention(index), qk_norm=QKNormConfig(self.norm, spans_heads=True))


class Olmo3(Olmo2):
    """Three layers with windows to one without, which alone has a scaled rotation."""

    defaults: ClassVar[Mapping[str, Any]] = {**Olmo2.defaults, "sliding_window": 4096}

    def rope(self, index: int) -> RopeConfig | None:
        theta = number_in(self.raw, "rope_theta", 500_000.0)
        return read_layer_rope(self.raw, self.config.head_dim, self.attention_type(index, 4), theta)

    def is_windowed(self, index: int) -> bool:
        return self.attention_type(index, 4) == "sliding_attention"


class Exaone4(Llama):
    mixer_norms, feed_forward_norms = Olmo2.mixer_norms, Olmo2.feed_forward_norms
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    }

    def attention(self, index: int) -> AttentionConfig:
        return replace(super().attention(index), qk_norm=QKNormConfig(self.norm), bias=False, output_bias=False)

    def rope(self, index: int) -> RopeConfig | None:
        has_rope = self.raw["sliding_window"] is None or self.is_windowed(index)
        return super().rope(index) if has_rope else None

    def is_windowed(self, index: int) -> bool:
        if self.raw.get("layer_types"):
            return self.attention_type(index) == "sliding_attention"
        pattern = count_in(self.raw, "sliding_window_pattern")
        return self.attention_type(index, pattern) == "sliding_attention"


ARCHITECTURES: Architectures = {
    "exaone4": Exaone4,
    "hunyuan_v1_dense": HunyuanDense,
    "llama": Llama,
    "olmo2": Olmo2,
    "olmo3": Olmo3,
    "seed_oss": SeedOss,
    "smollm3": SmolLM3,
}
