"""Qwen3-Next and Qwen3.5: most layers are gated delta nets, every few one is gated attention; dense or with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from cortex.neuron.layers.configs import (
    AttentionConfig,
    GatedDeltaConfig,
    MLPConfig,
    MoEConfig,
    NormConfig,
    QKNormConfig,
)
from cortex.neuron.models.config import count_in, optional_count_in
from cortex.neuron.models.errors import UnsupportedModel
from cortex.neuron.models.llama import Llama
from cortex.neuron.models.qwen3_moe import read_moe

LAYER_TYPES = ("linear_attention", "full_attention")


class Qwen3Next(Llama):
    defaults: ClassVar[Mapping[str, Any]] = {"partial_rotary_factor": 0.25, "norm_topk_prob": True}

    def mixer(self, index: int) -> AttentionConfig | GatedDeltaConfig:
        return self.attention(index) if self._layer_type(index) == "full_attention" else self._gated_delta()

    def attention(self, index: int) -> AttentionConfig:
        return replace(super().attention(index), qk_norm=QKNormConfig(self.norm), gated=True)

    @property
    def norm(self) -> NormConfig:
        return NormConfig(self.config.norm_eps, zero_centred=True)

    def feed_forward(self, index: int) -> MLPConfig | MoEConfig:
        return read_moe(self.raw, index, self.config.hidden) or super().feed_forward(index)

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
        types = self.raw.get("layer_types")
        if not types:
            interval = optional_count_in(self.raw, "full_attention_interval") or 4
            return "linear_attention" if (index + 1) % interval else "full_attention"
        num_layers = self.config.num_layers
        if len(types) != num_layers or not set(types) <= set(LAYER_TYPES):
            raise UnsupportedModel(f"layer_types must name {num_layers} layers, {' or '.join(LAYER_TYPES)}: {types}")
        return str(types[index])


class Qwen35Multimodal(Qwen3Next):
    """Qwen3.5 as published: the language model beside a vision tower, which is not loaded.

    In text the three position axes of its rotation are equal, so the ordinary rotation computes the same.
    """

    prefix = "model.language_model"
    notes = ("text only: the vision tower is not loaded",)

    def __init__(self, raw: Mapping[str, Any]) -> None:
        text = raw.get("text_config")
        if not isinstance(text, Mapping):
            raise UnsupportedModel(f"the config of this {raw['model_type']} model has no 'text_config'")
        tied = raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
        super().__init__({**text, "model_type": raw["model_type"], "tie_word_embeddings": tied})
