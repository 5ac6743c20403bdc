"""Qwen3, dense: Llama's shape with a norm on every query and key head, and windows on some layers."""

from __future__ import annotations

from dataclasses import replace

from cortex.neuron.layers.attention import AttentionConfig
from cortex.neuron.models.llama import Llama


class Qwen3(Llama):
    def attention_config(self, index: int) -> AttentionConfig:
        window = self.raw.get("sliding_window") if self._is_windowed(index) else None
        return replace(super().attention_config(index), qk_norm=True, window=window)

    def _is_windowed(self, index: int) -> bool:
        """Older configs name no `layer_types`: where windows are used at all, the layers from one on have them."""
        kinds = self.raw.get("layer_types")
        if kinds:
            return index < len(kinds) and kinds[index] == "sliding_attention"
        return bool(self.raw.get("use_sliding_window")) and index >= self.raw.get("max_window_layers", 28)
