"""MiniMax-M2: experts in every layer, scored with a sigmoid and chosen with a bias; norms of queries and keys over all
heads; part of each head rotates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from cortex.neuron.kernels.moe.rule import RouterRule
from cortex.neuron.layers.configs import AttentionConfig, MLPConfig, MoEConfig, QKNormConfig
from cortex.neuron.models.config import count_in
from cortex.neuron.models.families.llama import Llama
from cortex.neuron.models.mixtures.routed import routed


class MiniMaxM2(Llama):
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196_608,
        "rope_theta": 5_000_000.0,
        "num_experts_per_tok": 8,
        "num_local_experts": 256,
    }
    implemented: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "scoring_func": ("sigmoid", None),
        "use_routing_bias": (True, None),
        "use_qk_norm": (True, None),
        "qk_norm_type": ("per_layer", None),
        "shared_intermediate_size": (0, None),
    }

    def __init__(self, raw: Mapping[str, Any]) -> None:
        """Published configs give the dimensions that rotate, not their fraction."""
        if raw.get("rotary_dim") is not None:
            head_dim = count_in(raw, "head_dim", self.defaults["head_dim"])
            raw = {"partial_rotary_factor": count_in(raw, "rotary_dim") / head_dim, **raw}
        super().__init__(raw)

    def attention(self, index: int) -> AttentionConfig:
        norm = QKNormConfig(self.norm, spans_heads=True)
        return replace(super().attention(index), qk_norm=norm, bias=False, output_bias=False)

    def feed_forward(self, index: int) -> MLPConfig | MoEConfig:
        del index
        return routed(
            self.config.hidden,
            count_in(self.raw, "intermediate_size"),
            count_in(self.raw, "num_local_experts"),
            count_in(self.raw, "num_experts_per_tok"),
            renormalise=True,
            router=RouterRule("sigmoid"),
            has_bias=True,
        )
