"""Qwen2, Qwen2.5 and Qwen3, dense: Llama's shape with windows on some layers. Qwen2 has biases on queries, keys and
values; Qwen3 has norms on every query and key head instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from cortex.neuron.layers.configs import AttentionConfig, QKNormConfig
from cortex.neuron.models.config import count_in, layer_type_in
from cortex.neuron.models.families.llama import ATTENTION_TYPES, Llama
from cortex.neuron.models.text_part import TextPart


class Qwen3(Llama):
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096}

    def attention(self, index: int) -> AttentionConfig:
        return replace(super().attention(index), qk_norm=QKNormConfig(self.norm))

    def window(self, index: int) -> int | None:
        """Configs without `layer_types` give the first layer with a window instead."""
        is_after_first = self.raw.get("use_sliding_window") and index >= self.raw.get("max_window_layers", 28)
        default = "sliding_attention" if is_after_first else "full_attention"
        is_windowed = layer_type_in(self.raw, index, ATTENTION_TYPES, default) == "sliding_attention"
        return count_in(self.raw, "sliding_window") if is_windowed and self.raw.get("use_sliding_window") else None


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
