"""Nemotron-H and Nemotron 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cortex.neuron.kernels.moe.rule import RouterRule
from cortex.neuron.layers.configs import AttentionConfig, MLPConfig, MoEConfig
from cortex.neuron.layers.recurrent.configs import MambaConfig, RecurrentConfig
from cortex.neuron.models.architecture import Architecture, Architectures
from cortex.neuron.models.config import UnsupportedModel, count_in, number_in, optional_count_in
from cortex.neuron.models.families.granite import check_time_steps
from cortex.neuron.models.layer import BlockNorms

_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""The letters of `hybrid_override_pattern`."""
_OLDER_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
_OWN_NAMES = {
    "attention_head_dim": "head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_conv_bias": "use_conv_bias",
    "layer_norm_epsilon": "rms_norm_eps",
}
"""Options that some configs have under other names, or this program has."""


class NemotronH(Architecture):
    """Nemotron-H and Nemotron 3: every layer is one block, which is Mamba-2, attention without positions, a feed-
    forward block without a gate, or a mixture of experts without gates."""

    mixer_norms = BlockNorms(before="norm")
    feed_forward_norms = BlockNorms(before="norm")
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    }
    implemented: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "use_bias": (False, None),
        "mlp_bias": (False, None),
        "time_step_min": (0.001, None),
        "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": ("silu",),
        "sliding_window": (None,),
        "n_group": (1, None),
        "topk_group": (1, None),
    }

    def __init__(self, raw: Mapping[str, Any]) -> None:
        given = {**raw, **{own: raw[name] for name, own in _OWN_NAMES.items() if name in raw}}
        self._types = _layer_types(raw)
        super().__init__({**given, "num_hidden_layers": len(self._types), "hidden_act": "silu"})

    def mixer(self, index: int) -> AttentionConfig | RecurrentConfig | None:
        match self._types[index]:
            case "full_attention":
                return self._attention()
            case "linear_attention":
                return self._mamba()
        return None

    def feed_forward(self, index: int) -> MLPConfig | MoEConfig | None:
        match self._types[index]:
            case "mlp":
                return MLPConfig(self.config.hidden, count_in(self.raw, "intermediate_size"), gated=False)
            case "moe":
                return self._mixture()
        return None

    @property
    def num_unread_layers(self) -> int:
        return optional_count_in(self.raw, "num_nextn_predict_layers")

    def _attention(self) -> AttentionConfig:
        config = self.config
        scale = config.head_dim**-0.5
        return AttentionConfig(config.hidden, config.heads, config.kv_heads, config.head_dim, scale, rope=None)

    def _mixture(self) -> MoEConfig:
        return self.mixture(
            "moe_intermediate_size",
            "n_routed_experts",
            bool(self.raw["norm_topk_prob"]),
            shared_inner=count_in(self.raw, "moe_shared_expert_intermediate_size"),
            router=RouterRule("sigmoid", number_in(self.raw, "routed_scaling_factor", 1.0), gates_shared=False),
            has_bias=True,
            gated=False,
            latent=optional_count_in(self.raw, "moe_latent_size"),
        )

    def _mamba(self) -> MambaConfig:
        check_time_steps(self.raw)
        heads, groups = count_in(self.raw, "mamba_num_heads"), count_in(self.raw, "n_groups")
        if heads % groups:
            raise UnsupportedModel(f"{heads} Mamba heads cannot be divided into {groups} groups evenly")
        head_dim = count_in(self.raw, "mamba_head_dim")
        return MambaConfig(
            hidden=self.config.hidden,
            heads=heads,
            head_dim=head_dim,
            groups=groups,
            state_dim=count_in(self.raw, "ssm_state_size"),
            conv_taps=count_in(self.raw, "conv_kernel"),
            norm_eps=self.config.norm_eps,
            norm_size=heads // groups * head_dim,
            conv_bias=bool(self.raw["use_conv_bias"]),
        )


def _layer_types(raw: Mapping[str, Any]) -> list[str]:
    """What each layer is. Raises UnsupportedModel."""
    listed = raw.get("layers_block_type") or raw.get("layer_types")
    pattern = raw.get("hybrid_override_pattern")
    if listed:
        types = [_OLDER_NAMES.get(str(kind), str(kind)) for kind in listed]
    elif isinstance(pattern, str) and pattern:
        types = [_PATTERN.get(letter, letter) for letter in pattern]
    else:
        raise UnsupportedModel("the model's config has neither 'layers_block_type' nor 'hybrid_override_pattern'")
    if unknown := sorted(set(types) - set(_PATTERN.values())):
        raise UnsupportedModel(
            f"the model's config has layers of the type {unknown[0]!r:.80}; supported: {', '.join(_PATTERN.values())}"
        )
    return types


ARCHITECTURES: Architectures = {"nemotron_h": NemotronH}
