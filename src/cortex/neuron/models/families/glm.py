"""GLM-4 to GLM-4.7."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from cortex.neuron.kernels.moe.rule import RouterRule
from cortex.neuron.layers.configs import AttentionConfig, MLPConfig, MoEConfig, QKNormConfig
from cortex.neuron.models.architecture import Architectures
from cortex.neuron.models.config import UnsupportedModel, count_in, number_in, optional_count_in
from cortex.neuron.models.families.deepseek import LATENT_SIZES, DeepseekV3, WithNextLayers
from cortex.neuron.models.families.llama import Llama
from cortex.neuron.models.layer import BlockNorms


class Glm4(Llama):
    """GLM-4: norms around every block. Half of each head rotates, in pairs of adjacent dimensions: the checkpoint puts
    them apart (`weights/family_tensors.py`)."""

    mixer_norms = BlockNorms(before="input_layernorm", after="post_self_attn_layernorm")
    feed_forward_norms = BlockNorms(before="post_attention_layernorm", after="post_mlp_layernorm")
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1.5625e-07,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    }

    def attention(self, index: int) -> AttentionConfig:
        return replace(super().attention(index), output_bias=False)


class Glm4Moe(WithNextLayers):
    """GLM-4.5 to 4.7: a router that scores experts with a sigmoid, a bias for their choice, and a shared expert without
    a gate. The first layers are dense."""

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

    def attention(self, index: int) -> AttentionConfig:
        norm = QKNormConfig(self.norm) if self.raw.get("use_qk_norm") else None
        return replace(super().attention(index), qk_norm=norm, output_bias=False)

    def feed_forward(self, index: int) -> MLPConfig | MoEConfig:
        if index < optional_count_in(self.raw, "first_k_dense_replace"):
            return super().feed_forward(index)
        inner = count_in(self.raw, "moe_intermediate_size")
        return self.mixture(
            "moe_intermediate_size",
            "n_routed_experts",
            bool(self.raw["norm_topk_prob"]),
            shared_inner=inner * optional_count_in(self.raw, "n_shared_experts"),
            router=RouterRule("sigmoid", number_in(self.raw, "routed_scaling_factor", 1.0), gates_shared=False),
            has_bias=True,
        )


class Glm4MoeLite(DeepseekV3):
    """GLM-4.7-Flash. Its configs may list which layers have experts."""

    carries_norm = True
    defaults: ClassVar[Mapping[str, Any]] = {
        **LATENT_SIZES,
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


ARCHITECTURES: Architectures = {"glm4": Glm4, "glm4_moe": Glm4Moe, "glm4_moe_lite": Glm4MoeLite}
