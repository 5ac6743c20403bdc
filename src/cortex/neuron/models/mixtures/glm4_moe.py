"""GLM-4.5 to 4.7: a router that scores experts with a sigmoid, a bias for their choice, and a shared expert without a
gate. The first layers are dense."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from cortex.neuron.kernels.moe.rule import RouterRule
from cortex.neuron.layers.configs import AttentionConfig, MLPConfig, MoEConfig, QKNormConfig
from cortex.neuron.models.config import count_in, number_in, optional_count_in
from cortex.neuron.models.families.llama import Llama
from cortex.neuron.models.mixtures.routed import routed
from cortex.neuron.models.prediction import PredictionConfig, of_next_layer


class Glm4Moe(Llama):
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    }
    implemented: ClassVar[Mapping[str, tuple[Any, ...]]] = {"n_group": (1, None), "topk_group": (1, None)}

    @property
    def num_unread_layers(self) -> int:
        return optional_count_in(self.raw, "num_nextn_predict_layers")

    def read_head(self) -> PredictionConfig | None:
        index = self.config.num_layers
        if not self.num_unread_layers:
            return None
        name = f"{self.prefix}.layers.{index}"
        return of_next_layer(self.layer(index), self.norm, name, carries_norm=True)

    def attention(self, index: int) -> AttentionConfig:
        norm = QKNormConfig(self.norm) if self.raw.get("use_qk_norm") else None
        return replace(super().attention(index), qk_norm=norm, output_bias=False)

    def feed_forward(self, index: int) -> MLPConfig | MoEConfig:
        if index < optional_count_in(self.raw, "first_k_dense_replace"):
            return super().feed_forward(index)
        inner = count_in(self.raw, "moe_intermediate_size")
        return routed(
            self.config.hidden,
            inner,
            count_in(self.raw, "n_routed_experts"),
            count_in(self.raw, "num_experts_per_tok"),
            bool(self.raw["norm_topk_prob"]),
            shared_inner=inner * optional_count_in(self.raw, "n_shared_experts"),
            router=RouterRule("sigmoid", number_in(self.raw, "routed_scaling_factor", 1.0), gates_shared=False),
            has_bias=True,
        )
