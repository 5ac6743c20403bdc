"""Qwen2.5 to Qwen3.5, and Mellum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from cortex.neuron.layers.configs import (
    AttentionConfig,
    GateConfig,
    MLPConfig,
    MoEConfig,
    NormConfig,
    QKNormConfig,
    RopeConfig,
)
from cortex.neuron.layers.recurrent.configs import GatedDeltaConfig
from cortex.neuron.models.architecture import Architectures, TextPart
from cortex.neuron.models.config import (
    UnsupportedModel,
    count_in,
    layer_type_in,
    optional_count_in,
    read_layer_rope,
    routed,
)
from cortex.neuron.models.families.llama import ATTENTION_TYPES, Llama
from cortex.neuron.models.layer import LayerConfig, MixerConfig, PredictionConfig, of_mtp


class Qwen3(Llama):
    """Qwen2, Qwen2.5 and Qwen3, dense: Llama's shape with windows on some layers. Qwen2 has biases on queries, keys and
    values; Qwen3 has norms on every query and key head instead."""

    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096}

    def attention(self, index: int) -> AttentionConfig:
        return replace(super().attention(index), qk_norm=QKNormConfig(self.norm))

    def is_windowed(self, index: int) -> bool:
        """Configs without `layer_types` give the first layer with a window instead."""
        is_after_first = self.raw.get("use_sliding_window") and index >= self.raw.get("max_window_layers", 28)
        default = "sliding_attention" if is_after_first else "full_attention"
        is_listed = layer_type_in(self.raw, index, ATTENTION_TYPES, default) == "sliding_attention"
        return is_listed and bool(self.raw.get("use_sliding_window"))


class Qwen3VL(TextPart, Qwen3):
    """Qwen3 with a vision tower. In text the three position axes of its rotation are equal."""


class Qwen2(Qwen3):
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
    }

    def attention(self, index: int) -> AttentionConfig:
        return replace(super().attention(index), qk_norm=None, bias=True, output_bias=False)


MLP_TYPES = ("dense", "sparse")


class Qwen3Moe(Qwen3):
    """Qwen3-MoE: Qwen3 with a mixture of experts in place of most layers' feed-forward block. Mellum 2 adds windows and
    a rotation of their own for the layers that have them."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
    }

    def is_windowed(self, index: int) -> bool:
        """On every layer or on none: unlike Qwen3, it knows no types of layers."""
        del index
        return bool(self.raw.get("use_sliding_window")) and self.raw["sliding_window"] is not None

    def feed_forward(self, index: int) -> MLPConfig | MoEConfig:
        return read_moe(self.raw, index, self.config.hidden) or super().feed_forward(index)


class Qwen3VLMoe(TextPart, Qwen3Moe):
    """Qwen3-MoE with a vision tower."""

    defaults: ClassVar[Mapping[str, Any]] = {**Qwen3Moe.defaults, "norm_topk_prob": True}


class Mellum(Qwen3Moe):
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "num_local_experts": 64,
        "norm_topk_prob": True,
        "sliding_window": 1024,
    }

    def rope(self, index: int) -> RopeConfig | None:
        layer_type = self._type(index)
        theta = 500_000.0 if layer_type == "full_attention" else 10_000.0
        return read_layer_rope(self.raw, self.config.head_dim, layer_type, theta)

    def is_windowed(self, index: int) -> bool:
        return self._type(index) == "sliding_attention"

    def feed_forward(self, index: int) -> MLPConfig | MoEConfig:
        num_layers = self.config.num_layers
        types = self.raw.get("mlp_layer_types") or ["sparse"] * num_layers
        if len(types) != num_layers or not set(types) <= set(MLP_TYPES):
            raise UnsupportedModel(f"mlp_layer_types must name {num_layers} layers, {' or '.join(MLP_TYPES)}: {types}")
        return super().feed_forward(index) if types[index] == "sparse" else super(Qwen3Moe, self).feed_forward(index)

    def _type(self, index: int) -> str:
        return self.attention_type(index) if self.raw.get("layer_types") else "full_attention"


def read_moe(config: Mapping[str, Any], index: int, hidden: int) -> MoEConfig | None:
    """The experts of one layer; None for a dense layer. Raises UnsupportedModel if sizes contradict."""
    # Published configs have the first spelling, newer versions of the reference library write the second.
    experts = optional_count_in(config, "num_experts") or optional_count_in(config, "num_local_experts")
    if not experts or index in (config.get("mlp_only_layers") or ()):
        return None
    if (index + 1) % (optional_count_in(config, "decoder_sparse_step") or 1):
        return None
    return routed(
        hidden,
        count_in(config, "moe_intermediate_size"),
        experts,
        count_in(config, "num_experts_per_tok"),
        bool(config.get("norm_topk_prob", False)),
        shared_inner=optional_count_in(config, "shared_expert_intermediate_size"),
    )


LAYER_TYPES = ("linear_attention", "full_attention")


class Qwen3Next(Llama):
    """Qwen3-Next and Qwen3.5: most layers are gated delta nets, every few one is gated attention; dense or with
    experts."""

    defaults: ClassVar[Mapping[str, Any]] = {"partial_rotary_factor": 0.25, "norm_topk_prob": True}

    def mixer(self, index: int) -> MixerConfig:
        return self.attention(index) if self._layer_type(index) == "full_attention" else self._gated_delta()

    def attention(self, index: int) -> AttentionConfig:
        return replace(super().attention(index), qk_norm=QKNormConfig(self.norm), gate=GateConfig())

    @property
    def norm(self) -> NormConfig:
        return NormConfig(self.config.norm_eps, zero_centred=True)

    def feed_forward(self, index: int) -> MLPConfig | MoEConfig:
        return read_moe(self.raw, index, self.config.hidden) or super().feed_forward(index)

    def read_head(self) -> PredictionConfig | None:
        if self.raw.get("mtp_use_dedicated_embeddings"):
            return None
        attention, block = self.attention(self.config.num_layers), self.feed_forward(self.config.num_layers)
        layer = LayerConfig(attention, block, self.norm, self.mixer_norms, self.feed_forward_norms)
        return of_mtp(layer, self.norm)

    def _gated_delta(self) -> GatedDeltaConfig:
        key_heads = count_in(self.raw, "linear_num_key_heads")
        value_heads = count_in(self.raw, "linear_num_value_heads")
        if value_heads % key_heads:
            raise UnsupportedModel(f"{value_heads} value heads cannot share {key_heads} key heads evenly")
        return GatedDeltaConfig(
            hidden=self.config.hidden,
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=count_in(self.raw, "linear_key_head_dim"),
            value_dim=count_in(self.raw, "linear_value_head_dim"),
            conv_taps=count_in(self.raw, "linear_conv_kernel_dim"),
            norm_eps=self.config.norm_eps,
        )

    def _layer_type(self, index: int) -> str:
        """Listed by the config, or given by the distance between attention layers. Raises UnsupportedModel."""
        interval = optional_count_in(self.raw, "full_attention_interval") or 4
        default = "linear_attention" if (index + 1) % interval else "full_attention"
        return layer_type_in(self.raw, index, LAYER_TYPES, default)


class Qwen35Multimodal(TextPart, Qwen3Next):
    """Qwen3.5 as published. In text the three position axes of its rotation are equal, so the ordinary rotation
    computes the same."""


ARCHITECTURES: Architectures = {
    "mellum": Mellum,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe,
    "qwen3_5": Qwen35Multimodal,
    "qwen3_5_moe": Qwen35Multimodal,
    "qwen3_5_moe_text": Qwen3Next,
    "qwen3_5_text": Qwen3Next,
    "qwen3_next": Qwen3Next,
    "qwen3_vl": Qwen3VL,
    "qwen3_vl_moe": Qwen3VLMoe,
}
