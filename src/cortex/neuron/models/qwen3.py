"""Qwen3, dense: Llama's shape with a norm on every query and key head, and windows on some layers."""

from __future__ import annotations

from dataclasses import replace

from cortex.neuron.layers.attention import AttentionConfig
from cortex.neuron.models.llama import Llama


class Qwen3(Llama):
    def attention_config(self, index: int) -> AttentionConfig:
        kinds = self.raw.get("layer_types") or ()
        windowed = index < len(kinds) and kinds[index] == "sliding_attention"
        window = self.raw.get("sliding_window") if windowed else None
        return replace(super().attention_config(index), qk_norm=True, window=window)
