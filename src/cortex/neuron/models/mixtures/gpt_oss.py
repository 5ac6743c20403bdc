"""gpt-oss: a sink in every head, a window on every second layer, biases everywhere, and experts with a clamped
activation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from cortex.neuron.layers.configs import AttentionConfig, MLPConfig, MoEConfig
from cortex.neuron.models.config import count_in
from cortex.neuron.models.families.llama import Llama
from cortex.neuron.models.mixtures.routed import routed

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOss(Llama):
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "rope_parameters": _YARN,
        "sliding_window": 128,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
    }
    implemented: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu",),
        "swiglu_alpha": (1.702,),
        "swiglu_limit": (7.0,),
    }

    def window(self, index: int) -> int | None:
        is_windowed = self.attention_type(index, 2) == "sliding_attention" and self.raw["sliding_window"] is not None
        return count_in(self.raw, "sliding_window") if is_windowed else None

    def attention(self, index: int) -> AttentionConfig:
        return replace(super().attention(index), sinks=True)

    def feed_forward(self, index: int) -> MLPConfig | MoEConfig:
        del index
        # The softmax over the scores of the chosen experts is the one over all scores, scaled to sum to one.
        return routed(
            self.config.hidden,
            count_in(self.raw, "intermediate_size"),
            count_in(self.raw, "num_local_experts"),
            count_in(self.raw, "num_experts_per_tok"),
            renormalise=True,
            biased=True,
            activation="clamped_swiglu",
        )
