"""Qwen3-Next and Qwen3.5: most layers are gated delta nets, every few one is gated attention; dense or with experts."""

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
)
from cortex.neuron.layers.recurrent.configs import GatedDeltaConfig
from cortex.neuron.models.config import count_in, layer_type_in, optional_count_in
from cortex.neuron.models.errors import UnsupportedModel
from cortex.neuron.models.families.llama import Llama
from cortex.neuron.models.layer import LayerConfig
from cortex.neuron.models.mixtures.qwen3_moe import read_moe
from cortex.neuron.models.prediction import PredictionConfig, of_mtp
from cortex.neuron.models.sharding import MixerConfig
from cortex.neuron.models.text_part import TextPart

LAYER_TYPES = ("linear_attention", "full_attention")


class Qwen3Next(Llama):
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
