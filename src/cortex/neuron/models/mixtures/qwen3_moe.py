"""Qwen3-MoE: Qwen3 with a mixture of experts in place of most layers' feed-forward block. Mellum 2 adds windows and a
rotation of their own for the layers that have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cortex.neuron.layers.configs import MLPConfig, MoEConfig, RopeConfig
from cortex.neuron.models.config import count_in, optional_count_in, read_layer_rope
from cortex.neuron.models.errors import UnsupportedModel
from cortex.neuron.models.families.qwen import Qwen3
from cortex.neuron.models.mixtures.routed import routed
from cortex.neuron.models.text_part import TextPart

MLP_TYPES = ("dense", "sparse")


class Qwen3Moe(Qwen3):
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
    }

    def window(self, index: int) -> int | None:
        """On every layer or on none: unlike Qwen3, it knows no types of layers."""
        del index
        has_window = self.raw.get("use_sliding_window") and self.raw["sliding_window"] is not None
        return count_in(self.raw, "sliding_window") if has_window else None

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

    def window(self, index: int) -> int | None:
        return count_in(self.raw, "sliding_window") if self._type(index) == "sliding_attention" else None

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
