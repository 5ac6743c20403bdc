"""Qwen3, dense: Llama's shape with a norm on every query and key head, and windows on some layers."""

from __future__ import annotations

from dataclasses import replace

from cortex.neuron.layers.configs import AttentionConfig, QKNormConfig
from cortex.neuron.models.config import count_in
from cortex.neuron.models.errors import UnsupportedModel
from cortex.neuron.models.llama import Llama

LAYER_TYPES = ("full_attention", "sliding_attention")


class Qwen3(Llama):
    def attention(self, index: int) -> AttentionConfig:
        window = count_in(self.raw, "sliding_window") if self._has_window(index) else None
        return replace(super().attention(index), qk_norm=QKNormConfig(self.norm), window=window)

    def _has_window(self, index: int) -> bool:
        """Configs without `layer_types` give the first layer with a window instead.

        Raises UnsupportedModel for a list that does not name the type of every layer.
        """
        types = self.raw.get("layer_types")
        if types:
            num_layers = self.config.num_layers
            if len(types) != num_layers or not set(types) <= set(LAYER_TYPES):
                allowed = " or ".join(LAYER_TYPES)
                raise UnsupportedModel(f"layer_types must name {num_layers} layers, {allowed}: {types}")
            return types[index] == "sliding_attention" and self.raw.get("use_sliding_window") is not False
        return bool(self.raw.get("use_sliding_window")) and index >= self.raw.get("max_window_layers", 28)
