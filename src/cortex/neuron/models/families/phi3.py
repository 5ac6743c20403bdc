"""Phi-3 and Phi-4: Llama's shape; part of each head may rotate, with other frequencies in long contexts. Their files
have one matrix for queries, keys and values, and one for gate and up (`weights/family_tensors.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cortex.neuron.layers.configs import RopeConfig
from cortex.neuron.models.config import count_in, read_rope, rope_settings
from cortex.neuron.models.families.mistral import Mistral


class Phi3(Mistral):
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
