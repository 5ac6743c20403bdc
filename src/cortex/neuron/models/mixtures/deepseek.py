"""DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash: latent attention, and experts in groups. The first layers are dense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from cortex.neuron.kernels.moe.rule import RouterRule
from cortex.neuron.layers.configs import MLPConfig, MoEConfig
from cortex.neuron.models.config import count_in, number_in, optional_count_in
from cortex.neuron.models.errors import UnsupportedModel
from cortex.neuron.models.families.latent import LatentLlama
from cortex.neuron.models.mixtures.routed import routed
from cortex.neuron.models.prediction import PredictionConfig, of_next_layer

_SIZES: Mapping[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
    "norm_topk_prob": True,
}


class DeepseekV3(LatentLlama):
    """A router that scores experts with a sigmoid, and a bias for their choice."""

    has_bias: ClassVar[bool] = True
    carries_norm: ClassVar[bool] = False
    """See `PredictionConfig`."""
    defaults: ClassVar[Mapping[str, Any]] = {
        **_SIZES,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
    }
    implemented: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "moe_layer_freq": (1, None),
        "scoring_func": ("sigmoid", None),
        "topk_method": ("noaux_tc", None),
    }

    @property
    def num_unread_layers(self) -> int:
        return optional_count_in(self.raw, "num_nextn_predict_layers")

    def read_head(self) -> PredictionConfig | None:
        index = self.config.num_layers
        if not self.num_unread_layers:
            return None
        name = f"{self.prefix}.layers.{index}"
        return of_next_layer(self.layer(index), self.norm, name, carries_norm=self.carries_norm)

    def feed_forward(self, index: int) -> MLPConfig | MoEConfig:
        return super().feed_forward(index) if self._is_dense(index) else self._mixture()

    def _is_dense(self, index: int) -> bool:
        return index < optional_count_in(self.raw, "first_k_dense_replace")

    def _mixture(self) -> MoEConfig:
        inner, experts = count_in(self.raw, "moe_intermediate_size"), count_in(self.raw, "n_routed_experts")
        groups, kept = optional_count_in(self.raw, "n_group") or 1, optional_count_in(self.raw, "topk_group") or 1
        top_k = count_in(self.raw, "num_experts_per_tok")
        size = experts // groups
        if experts % groups or kept > groups or kept * size < top_k or (groups > kept and self.has_bias and size < 2):
            raise UnsupportedModel(
                f"the model's config asks for {top_k} of {experts} experts in {kept} of {groups} groups; "
                "is it complete?"
            )
        scale = number_in(self.raw, "routed_scaling_factor", 1.0)
        scoring: Literal["sigmoid", "softmax"] = "sigmoid" if self.has_bias else "softmax"
        return routed(
            self.config.hidden,
            inner,
            experts,
            top_k,
            bool(self.raw["norm_topk_prob"]),
            shared_inner=inner * optional_count_in(self.raw, "n_shared_experts"),
            router=RouterRule(scoring, scale, groups, kept, gates_shared=False),
            has_bias=self.has_bias,
        )


class DeepseekV2(DeepseekV3):
    """A router with a softmax and no bias, whose weights are never scaled to sum to one."""

    has_bias = False
    defaults: ClassVar[Mapping[str, Any]] = {
        **_SIZES,
        "norm_topk_prob": False,
        "max_position_embeddings": 2048,
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "moe_intermediate_size": 1407,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
    }
    implemented: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "moe_layer_freq": (1, None),
        "mlp_bias": (False, None),
        "norm_topk_prob": (False, None),
        "scoring_func": ("softmax", None),
        "topk_method": ("greedy", "group_limited_greedy"),
    }

    def __init__(self, raw: Mapping[str, Any]) -> None:
        if raw.get("topk_method", "greedy") == "greedy":  # then the config's groups have no meaning
            raw = {**raw, "n_group": 1, "topk_group": 1}
        super().__init__(raw)


class Glm4MoeLite(DeepseekV3):
    """GLM-4.7-Flash. Its configs may list which layers have experts."""

    carries_norm = True

    defaults: ClassVar[Mapping[str, Any]] = {
        **_SIZES,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "max_position_embeddings": 202_752,
        "rms_norm_eps": 1e-5,
        "n_shared_experts": 1,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }

    def _is_dense(self, index: int) -> bool:
        listed = self.raw.get("mlp_layer_types")
        if not listed or index >= self.config.num_layers:
            return super()._is_dense(index)
        if len(listed) != self.config.num_layers or not set(listed) <= {"dense", "sparse"}:
            raise UnsupportedModel(
                f"mlp_layer_types must name {self.config.num_layers} layers, dense or sparse: {listed!r:.80}"
            )
        return bool(listed[index] == "dense")
