"""gte-en-v1.5, gte-multilingual and snowflake-arctic-embed-v2: BERT with rotated positions and a gated feed-forward
block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from cortex.neuron.layers.configs import MLPConfig, RopeConfig
from cortex.neuron.models.config import number_in, read_rope, rope_settings
from cortex.neuron.models.encoders.architecture import EncoderArchitecture
from cortex.neuron.models.errors import UnsupportedModel


class Gte(EncoderArchitecture):
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 250_048,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "max_position_embeddings": 8192,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-12,
        "rope_theta": 160_000.0,
    }
    implemented: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "position_embedding_type": ("rope", None),
        "layer_norm_type": ("layer_norm", None),
        "logn_attention_scale": (False, None),
    }

    def rope(self, index: int) -> RopeConfig | None:
        del index
        settings = rope_settings(self.raw)
        if (settings.get("rope_type") or settings.get("type")) != "ntk":
            return read_rope(self.raw, self.config.head_dim)
        if settings.get("mixed_b") is not None:
            raise UnsupportedModel("rope scaling 'ntk' with mixed_b is not supported")
        # Longer wavelengths by a larger base, and all of them a little longer: a base and a linear factor.
        theta, factor = number_in(self.raw, "rope_theta", 10_000.0), number_in(settings, "factor", 1.0)
        stretch = factor ** (2 / self.config.head_dim)
        scaling = {"rope_theta": theta * factor, "rope_type": "linear", "factor": stretch}
        return read_rope(self.raw, self.config.head_dim, scaling)

    def feed_forward(self, index: int) -> MLPConfig:
        return replace(super().feed_forward(index), bias=False, gated=True)
