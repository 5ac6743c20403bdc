"""Mistral, Ministral 3 and Phi-3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from cortex.neuron.layers.configs import AttentionConfig, QueryGrowth, RopeConfig
from cortex.neuron.models.architecture import Architecture, Architectures, TextPart
from cortex.neuron.models.config import count_in, number_in, read_rope, rope_settings
from cortex.neuron.models.families.llama import Llama


class Mistral(Llama):
    """Mistral and Ministral 3, also as the language model of Mistral Small 3.1 and later: Llama's shape with a window
    on every layer, where the config has one. Queries of Ministral 3 grow beyond the context that it was trained
    on."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    }

    def is_windowed(self, index: int) -> bool:
        del index
        return self.raw.get("sliding_window") is not None


class Ministral3(Mistral):
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    }

    def attention(self, index: int) -> AttentionConfig:
        attention = super().attention(index)
        settings = rope_settings(self.raw)
        if not settings.get("llama_4_scaling_beta"):
            return attention
        beta = number_in(settings, "llama_4_scaling_beta", 0.0)
        growth = QueryGrowth(beta, count_in(settings, "original_max_position_embeddings"))
        return replace(attention, query_growth=growth)


class _MistralText(TextPart, Mistral):
    pass


class _Ministral3Text(TextPart, Ministral3):
    pass


def mistral3(raw: Mapping[str, Any]) -> Architecture:
    """The language model of a Mistral 3 model, of either family."""
    text = raw.get("text_config")
    is_ministral = isinstance(text, Mapping) and text.get("model_type") == "ministral3"
    return (_Ministral3Text if is_ministral else _MistralText)({"tie_word_embeddings": True, **raw})


class Phi3(Mistral):
    """Phi-3 and Phi-4: Llama's shape; part of each head may rotate, with other frequencies in long contexts. Their
    files have one matrix for queries, keys and values, and one for gate and up (`weights/family_tensors.py`)."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
    implemented: ClassVar[Mapping[str, tuple[Any, ...]]] = {"full_attn_mod": (1, None), "lm_head_bias": (False, None)}

    def rope(self, index: int) -> RopeConfig | None:
        del index
        settings = dict(rope_settings(self.raw))
        if settings.get("rope_type", settings.get("type")) in ("longrope", "su", "yarn"):  # older names of the same
            settings["rope_type"] = "longrope"
            settings["original_max_position_embeddings"] = count_in(self.raw, "original_max_position_embeddings")
        return read_rope(self.raw, self.config.head_dim, settings)


ARCHITECTURES: Architectures = {"ministral3": Ministral3, "mistral": Mistral, "mistral3": mistral3, "phi3": Phi3}
