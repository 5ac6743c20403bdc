"""DeepSeek V2 and V3, Kimi K2 and Youtu: latent attention (MLA), in which all heads share one latent per token, from
which keys and values are made. All but Youtu have experts in groups, behind dense first layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from cortex.neuron.kernels.moe.rule import RouterRule
from cortex.neuron.layers.configs import LatentAttentionConfig, MLPConfig, MoEConfig, NormConfig, RopeConfig, Shard
from cortex.neuron.models.architecture import Architecture, Architectures
from cortex.neuron.models.config import (
    UnsupportedModel,
    count_in,
    number_in,
    optional_count_in,
    read_rope,
    rope_settings,
)
from cortex.neuron.models.families.llama import Llama
from cortex.neuron.models.layer import MixerConfig, PredictionConfig

_LATENT_NORM = NormConfig(1e-6)
"""It normalises the low-rank parts, whatever the config has for the others."""


class WithNextLayers(Llama):
    """Checkpoints have layers after the last one that predict further tokens. The first of them is the head."""

    carries_norm: ClassVar[bool] = True
    """See `PredictionConfig`."""

    @property
    def num_unread_layers(self) -> int:
        return optional_count_in(self.raw, "num_nextn_predict_layers")

    def read_head(self) -> PredictionConfig | None:
        if not self.num_unread_layers:
            return None
        name = f"{self.prefix}.layers.{self.config.num_layers}"
        return PredictionConfig(
            self.layer(self.config.num_layers),
            self.norm,
            layer_name=name,
            projection=f"{name}.eh_proj",
            embedding_norm=f"{name}.enorm",
            hidden_norm=f"{name}.hnorm",
            last_norm=f"{name}.shared_head.norm",
            carries_norm=self.carries_norm,
        )


class LatentLlama(Llama):
    """Llama's shape with latent attention."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        """The number and width of key-value heads, which some configs have, mean nothing here."""
        super().__init__({name: raw[name] for name in raw if name not in ("num_key_value_heads", "head_dim")})

    def sharded(self, shard: Shard) -> Architecture:
        part = super().sharded(shard)
        if not shard.is_whole:
            part.notes = (*self.notes, "every device keeps the whole KV cache: attention heads share its latents")
        return part

    def mixer(self, index: int) -> MixerConfig:
        del index
        plain_dims, rope_dims = count_in(self.raw, "qk_nope_head_dim"), count_in(self.raw, "qk_rope_head_dim")
        rope = read_rope(self.raw, rope_dims)
        if rope.dims != rope_dims:
            raise UnsupportedModel(f"the model's config rotates {rope.dims} of {rope_dims} dimensions, not all of them")
        q_rank, bias = optional_count_in(self.raw, "q_lora_rank"), bool(self.raw.get("attention_bias", False))
        if bias and not q_rank:
            raise UnsupportedModel("attention_bias is true without q_lora_rank, which is not supported for this model")
        return LatentAttentionConfig(
            hidden=self.config.hidden,
            heads=self.config.heads,
            latent=count_in(self.raw, "kv_lora_rank"),
            plain_dims=plain_dims,
            rope_dims=rope_dims,
            value_dim=count_in(self.raw, "v_head_dim"),
            scale=(plain_dims + rope_dims) ** -0.5 * self._stretched_scale(rope),
            rope=rope,
            norm=_LATENT_NORM,
            q_rank=q_rank,
            bias=bias,
            output_bias=bias,
            interleaved=bool(self.raw.get("rope_interleave", True)),
        )

    def _stretched_scale(self, rope: RopeConfig) -> float:
        """What a model that was extended to longer contexts multiplies its scores by."""
        weight = rope_settings(self.raw).get("mscale_all_dim")
        factor = float(rope.settings.get("factor") or 1.0)
        if not weight or factor <= 1:
            return 1.0
        return (0.1 * float(weight) * math.log(factor) + 1.0) ** 2


class Youtu(LatentLlama):
    defaults: ClassVar[Mapping[str, Any]] = {
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    }


LATENT_SIZES: Mapping[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
    "norm_topk_prob": True,
}


class DeepseekV3(WithNextLayers, LatentLlama):
    """A router that scores experts with a sigmoid, and a bias for their choice."""

    has_bias: ClassVar[bool] = True
    carries_norm = False
    defaults: ClassVar[Mapping[str, Any]] = {
        **LATENT_SIZES,
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

    def feed_forward(self, index: int) -> MLPConfig | MoEConfig:
        return super().feed_forward(index) if self._is_dense(index) else self._mixture()

    def _is_dense(self, index: int) -> bool:
        return index < optional_count_in(self.raw, "first_k_dense_replace")

    def _mixture(self) -> MoEConfig:
        experts = count_in(self.raw, "n_routed_experts")
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
        return self.mixture(
            "moe_intermediate_size",
            "n_routed_experts",
            bool(self.raw["norm_topk_prob"]),
            shared_inner=count_in(self.raw, "moe_intermediate_size") * optional_count_in(self.raw, "n_shared_experts"),
            router=RouterRule(scoring, scale, groups, kept, gates_shared=False),
            has_bias=self.has_bias,
        )


class DeepseekV2(DeepseekV3):
    """A router with a softmax and no bias, whose weights are never scaled to sum to one."""

    has_bias = False
    defaults: ClassVar[Mapping[str, Any]] = {
        **LATENT_SIZES,
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


ARCHITECTURES: Architectures = {
    "deepseek_v2": DeepseekV2,
    "deepseek_v3": DeepseekV3,
    "kimi_k2": DeepseekV3,
    "youtu": Youtu,
}
