"""Granite 4: Mamba-2 and attention layers, Granite's multipliers, and a feed-forward block or a mixture of experts
with a shared one. Models that only have attention layers are of the same family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cortex.neuron.kernels.moe.rule import RouterRule
from cortex.neuron.layers.configs import AttentionConfig, MLPConfig, MoEConfig, RopeConfig
from cortex.neuron.layers.recurrent.configs import MambaConfig, RecurrentConfig
from cortex.neuron.models.config import count_in, layer_type_in, optional_count_in
from cortex.neuron.models.errors import UnsupportedModel
from cortex.neuron.models.families.granite import Granite
from cortex.neuron.models.hybrids.time_steps import check_time_steps
from cortex.neuron.models.mixtures.routed import routed

ATTENTION, MAMBA = ("full_attention", "attention"), ("linear_attention", "mamba")
"""The types of layers: as the reference library writes them, and as published configs have them."""


class GraniteMoeHybrid(Granite):
    defaults: ClassVar[Mapping[str, Any]] = {
        "max_position_embeddings": 2048,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_head": "auto",
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
    }
    implemented: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu",),
        "mamba_proj_bias": (False, None),
        "position_embedding_type": (None, "nope", "rope"),
    }

    def mixer(self, index: int) -> AttentionConfig | RecurrentConfig:
        is_attention = layer_type_in(self.raw, index, (*ATTENTION, *MAMBA), MAMBA[0]) in ATTENTION
        return self.attention(index) if is_attention else self._mamba()

    def rope(self, index: int) -> RopeConfig | None:
        return super().rope(index) if self.raw.get("position_embedding_type") == "rope" else None

    def feed_forward(self, index: int) -> MLPConfig | MoEConfig:
        del index
        shared_inner = count_in(self.raw, "shared_intermediate_size")
        experts = optional_count_in(self.raw, "num_local_experts")
        if not experts:
            return MLPConfig(self.config.hidden, shared_inner)
        return routed(
            self.config.hidden,
            count_in(self.raw, "intermediate_size"),
            experts,
            count_in(self.raw, "num_experts_per_tok"),
            True,
            shared_inner=shared_inner,
            router=RouterRule(gates_shared=False),
        )

    def _mamba(self) -> MambaConfig:
        check_time_steps(self.raw)
        heads, groups = count_in(self.raw, "mamba_n_heads"), count_in(self.raw, "mamba_n_groups")
        inner = count_in(self.raw, "mamba_expand") * self.config.hidden
        head_dim = inner // heads
        if self.raw["mamba_d_head"] != "auto":
            head_dim = count_in(self.raw, "mamba_d_head")
        if heads * head_dim != inner or heads % groups:
            raise UnsupportedModel(
                f"{heads} Mamba heads of {head_dim} values in {groups} groups do not divide {inner} values evenly"
            )
        return MambaConfig(
            hidden=self.config.hidden,
            heads=heads,
            head_dim=head_dim,
            groups=groups,
            state_dim=count_in(self.raw, "mamba_d_state"),
            conv_taps=count_in(self.raw, "mamba_d_conv"),
            norm_eps=self.config.norm_eps,
            norm_size=heads // groups * head_dim,
            conv_bias=bool(self.raw["mamba_conv_bias"]),
        )
