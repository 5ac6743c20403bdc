"""Families with experts and one published line each: gpt-oss, MiniMax-M2, Laguna and ERNIE 4.5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from cortex.neuron.kernels.moe.rule import RouterRule
from cortex.neuron.layers.configs import AttentionConfig, GateConfig, MLPConfig, MoEConfig, QKNormConfig, RopeConfig
from cortex.neuron.models.architecture import Architectures
from cortex.neuron.models.config import (
    UnsupportedModel,
    count_in,
    layer_type_in,
    number_in,
    optional_count_in,
    read_layer_rope,
)
from cortex.neuron.models.families.llama import ATTENTION_TYPES, Llama

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOss(Llama):
    """gpt-oss: a sink in every head, a window on every second layer, biases everywhere, and experts with a clamped
    activation."""

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

    def is_windowed(self, index: int) -> bool:
        return self.attention_type(index, 2) == "sliding_attention" and self.raw["sliding_window"] is not None

    def attention(self, index: int) -> AttentionConfig:
        return replace(super().attention(index), sinks=True)

    def feed_forward(self, index: int) -> MLPConfig | MoEConfig:
        del index
        # The softmax over the scores of the chosen experts is the one over all scores, scaled to sum to one.
        return self.mixture("intermediate_size", "num_local_experts", True, biased=True, activation="clamped_swiglu")


class MiniMaxM2(Llama):
    """MiniMax-M2: experts in every layer, scored with a sigmoid and chosen with a bias; norms of queries and keys over
    all heads; part of each head rotates."""

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
        router = RouterRule("sigmoid")
        return self.mixture("intermediate_size", "num_local_experts", True, router=router, has_bias=True)


class Laguna(Llama):
    """Laguna: layers with different numbers of heads, a gate of attention's output, windows with a rotation of their
    own, and a router that scores experts with a sigmoid. The first layer is dense."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "sliding_window": 512,
        "rope_parameters": {
            "full_attention": {"rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_theta": 10_000.0},
        },
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }
    implemented: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "gating": (True, "per-head", "per-element", None),
        "moe_apply_router_weight_on_input": (False, None),
        "moe_router_logit_softcapping": (0, None),
    }

    def attention(self, index: int) -> AttentionConfig:
        heads = self._of_layer("num_attention_heads_per_layer", index, self.config.heads)
        if type(heads) is not int or heads < 1 or heads % self.config.kv_heads:
            raise UnsupportedModel(
                f"{heads!r:.80} attention heads of layer {index} cannot share {self.config.kv_heads} key-value heads "
                "evenly"
            )
        return replace(
            super().attention(index),
            heads=heads,
            qk_norm=QKNormConfig(self.norm),
            gate=GateConfig("g_proj", "softplus", is_per_head=self.raw.get("gating") != "per-element"),
        )

    def rope(self, index: int) -> RopeConfig | None:
        return read_layer_rope(self.raw, self.config.head_dim, self._type(index), 10_000.0)

    def is_windowed(self, index: int) -> bool:
        return self._type(index) == "sliding_attention"

    def feed_forward(self, index: int) -> MLPConfig | MoEConfig:
        kind = self._of_layer("mlp_layer_types", index, "sparse" if index else "dense")
        if kind not in ("dense", "sparse"):
            raise UnsupportedModel(f"mlp_layer_types names {kind!r:.80}; a layer is dense or sparse")
        if kind == "dense":
            return super().feed_forward(index)
        scale = number_in(self.raw, "moe_routed_scaling_factor", 1.0)
        return self.mixture(
            "moe_intermediate_size",
            "num_experts",
            True,
            shared_inner=optional_count_in(self.raw, "shared_expert_intermediate_size"),
            router=RouterRule("sigmoid", scale, gates_shared=False),
            has_bias=True,
        )

    def _type(self, index: int) -> str:
        return layer_type_in(self.raw, index, ATTENTION_TYPES, "full_attention")

    def _of_layer(self, name: str, index: int, default: Any) -> Any:
        """What a list of the config has for one layer; `default` without the list. Raises UnsupportedModel."""
        listed = self.raw.get(name)
        if listed is None:
            return default
        if not isinstance(listed, list) or len(listed) != self.config.num_layers:
            raise UnsupportedModel(f"{name} must have {self.config.num_layers} values: {listed!r:.80}")
        return listed[index]


class Ernie45(Llama):
    """ERNIE 4.5, dense: Llama's shape. Pairs of adjacent dimensions rotate: the checkpoint puts them apart
    (`weights/family_tensors.py`)."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    }

    def __init__(self, raw: Mapping[str, Any]) -> None:
        bias = bool(raw.get("use_bias", False))
        super().__init__({**raw, "attention_bias": bias, "mlp_bias": bias})


class Ernie45Moe(Ernie45):
    """ERNIE 4.5 with experts: a bias for the choice of experts, and shared experts without a gate."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_intermediate_size": 1536,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    }
    implemented: ClassVar[Mapping[str, tuple[Any, ...]]] = {"moe_gate": ("topk", None), "use_bias": (False, None)}

    def feed_forward(self, index: int) -> MLPConfig | MoEConfig:
        first, last = optional_count_in(self.raw, "moe_layer_start_index"), int(self.raw["moe_layer_end_index"])
        is_inside = first <= index <= (last if last >= 0 else self.config.num_layers)
        if not is_inside or (index + 1) % count_in(self.raw, "moe_layer_interval"):
            return super().feed_forward(index)
        inner = count_in(self.raw, "moe_intermediate_size")
        return self.mixture(
            "moe_intermediate_size",
            "moe_num_experts",
            True,
            top_k="moe_k",
            shared_inner=inner * optional_count_in(self.raw, "moe_num_shared_experts"),
            router=RouterRule(gates_shared=False),
            has_bias=True,
        )


ARCHITECTURES: Architectures = {
    "ernie4_5": Ernie45,
    "ernie4_5_moe": Ernie45Moe,
    "gpt_oss": GptOss,
    "laguna": Laguna,
    "minimax_m2": MiniMaxM2,
}
