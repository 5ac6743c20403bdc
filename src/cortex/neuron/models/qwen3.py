"""Qwen3, dense: Llama's shape with a norm on every query and key head, and windows on some layers."""

from __future__ import annotations

from dataclasses import replace

from cortex.neuron.layers.attention import AttentionConfig
from cortex.neuron.models.config import count_in
from cortex.neuron.models.errors import UnsupportedModel
from cortex.neuron.models.llama import Llama

KINDS = ("full_attention", "sliding_attention")


class Qwen3(Llama):
    def attention_config(self, index: int) -> AttentionConfig:
        window = count_in(self.raw, "sliding_window") if self._is_windowed(index) else None
        return replace(super().attention_config(index), qk_norm=True, window=window)

    def _is_windowed(self, index: int) -> bool:
        """Older configs name no `layer_types`: where windows are used at all, the layers from one on have them.

        Raises UnsupportedModel for a list that does not say of every layer what it is.
        """
        kinds = self.raw.get("layer_types")
        if kinds:
            num_layers = self.config.num_layers
            if len(kinds) != num_layers or not set(kinds) <= set(KINDS):
                raise UnsupportedModel(f"layer_types must name {num_layers} layers, {' or '.join(KINDS)}: {kinds}")
            return kinds[index] == "sliding_attention" and self.raw.get("use_sliding_window") is not False
        return bool(self.raw.get("use_sliding_window")) and index >= self.raw.get("max_window_layers", 28)
