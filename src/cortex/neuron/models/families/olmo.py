"""OLMo 2 and 3 and EXAONE 4: norms after the blocks in place of those before them.

OLMo normalises queries and keys over all heads, EXAONE each head. EXAONE's layers without a window do not encode
positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from cortex.neuron.layers.configs import AttentionConfig, QKNormConfig, RopeConfig
from cortex.neuron.models.config import count_in, number_in, read_layer_rope
from cortex.neuron.models.families.llama import Llama
from cortex.neuron.models.layer import BlockNorms


class Olmo2(Llama):
    mixer_norms = BlockNorms(after="post_attention_layernorm")
    feed_forward_norms = BlockNorms(after="post_feedforward_layernorm")
    defaults: ClassVar[Mapping[str, Any]] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}

    def attention(self, index: int) -> AttentionConfig:
        return replace(super().attention(index), qk_norm=QKNormConfig(self.norm, spans_heads=True))


class Olmo3(Olmo2):
    """Three layers with windows to one without, which alone has a scaled rotation."""

    defaults: ClassVar[Mapping[str, Any]] = {**Olmo2.defaults, "sliding_window": 4096}

    def rope(self, index: int) -> RopeConfig | None:
        theta = number_in(self.raw, "rope_theta", 500_000.0)
        return read_layer_rope(self.raw, self.config.head_dim, self.attention_type(index, 4), theta)

    def window(self, index: int) -> int | None:
        is_windowed = self.attention_type(index, 4) == "sliding_attention"
        return count_in(self.raw, "sliding_window") if is_windowed else None


class Exaone4(Llama):
    mixer_norms, feed_forward_norms = Olmo2.mixer_norms, Olmo2.feed_forward_norms
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    }

    def attention(self, index: int) -> AttentionConfig:
        return replace(super().attention(index), qk_norm=QKNormConfig(self.norm), bias=False, output_bias=False)

    def rope(self, index: int) -> RopeConfig | None:
        has_rope = self.raw["sliding_window"] is None or self._has_window(index)
        return super().rope(index) if has_rope else None

    def window(self, index: int) -> int | None:
        return count_in(self.raw, "sliding_window") if self._has_window(index) else None

    def _has_window(self, index: int) -> bool:
        if self.raw.get("layer_types"):
            return self.attention_type(index) == "sliding_attention"
        pattern = count_in(self.raw, "sliding_window_pattern")
        return self.attention_type(index, pattern) == "sliding_attention"
