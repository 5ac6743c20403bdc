"""ModernBERT (gte-modernbert, modernbert-embed): norms before blocks, windows on two layers of three, two rotations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from cortex.neuron.layers.configs import MLPConfig, NormConfig, RopeConfig
from cortex.neuron.models.architecture import EndsConfig
from cortex.neuron.models.config import count_in, layer_type_in, number_in, read_layer_rope
from cortex.neuron.models.encoders.architecture import EncoderArchitecture
from cortex.neuron.models.families.llama import ATTENTION_TYPES
from cortex.neuron.models.layer import BlockNorms, LayerConfig


class ModernBert(EncoderArchitecture):
    mixer_norms = BlockNorms(before="attn_norm")
    feed_forward_norms = BlockNorms(before="mlp_norm")
    norm_option = "norm_eps"
    activation_option = "hidden_activation"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 50_368,
        "hidden_size": 768,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "intermediate_size": 1152,
        "hidden_activation": "gelu",
        "max_position_embeddings": 8192,
        "norm_eps": 1e-5,
        "local_attention": 128,
        "global_attn_every_n_layers": 3,
    }

    @property
    def norm(self) -> NormConfig:
        return NormConfig(self.config.norm_eps, subtracts_mean=True, has_bias=bool(self.raw.get("norm_bias")))

    def read_ends(self) -> EndsConfig:
        return EndsConfig(self.norm, norms=("embed_norm", "norm"))

    def layer(self, index: int) -> LayerConfig:
        layer = super().layer(index)
        return layer if index else replace(layer, mixer_norms=BlockNorms())  # the embedding has a norm already

    @property
    def has_attention_bias(self) -> bool:
        return bool(self.raw.get("attention_bias"))

    def rope(self, index: int) -> RopeConfig | None:
        layer_type = self._type(index)
        name, default = ("global_rope_theta", 160_000.0)
        if layer_type == "sliding_attention":
            name, default = "local_rope_theta", 10_000.0
        theta = number_in(self.raw, name, default)
        return read_layer_rope(self.raw, self.config.head_dim, layer_type, theta)

    def window(self, index: int) -> int | None:
        is_windowed = self._type(index) == "sliding_attention"
        return count_in(self.raw, "local_attention") // 2 + 1 if is_windowed else None

    def feed_forward(self, index: int) -> MLPConfig:
        bias = bool(self.raw.get("mlp_bias"))
        return replace(super().feed_forward(index), bias=bias, output_bias=bias, gated=True)

    def _type(self, index: int) -> str:
        every = count_in(self.raw, "global_attn_every_n_layers")
        return layer_type_in(
            self.raw, index, ATTENTION_TYPES, "sliding_attention" if index % every else "full_attention"
        )
