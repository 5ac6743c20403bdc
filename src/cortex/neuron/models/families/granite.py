"""Granite: Llama's shape with four multipliers. The hybrid ones have Mamba-2 layers, and may have experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from cortex.neuron.kernels.moe.rule import RouterRule
from cortex.neuron.layers.configs import AttentionConfig, MLPConfig, MoEConfig, NormConfig, RopeConfig
from cortex.neuron.layers.recurrent.configs import MambaConfig, RecurrentConfig
from cortex.neuron.models.architecture import Architectures, EndsConfig
from cortex.neuron.models.config import UnsupportedModel, count_in, layer_type_in, number_in
from cortex.neuron.models.families.llama import Llama


class Granite(Llama):
    """The multiplier m of what a block adds to the residual stream h costs nothing: h / m is kept in place of h. Then
    blocks add their output as it is, the embedding is divided by m, and norms, which do not depend on the length of
    their input otherwise, have eps / m²."""

    defaults: ClassVar[Mapping[str, Any]] = {"max_position_embeddings": 2048}

    def _multiplier(self, name: str) -> float:
        return number_in(self.raw, name, 1.0)

    @property
    def norm(self) -> NormConfig:
        return NormConfig(self.config.norm_eps / self._multiplier("residual_multiplier") ** 2)

    def read_ends(self) -> EndsConfig:
        last = replace(self.norm, scale=1 / self._multiplier("logits_scaling"))
        return EndsConfig(last, self._multiplier("embedding_multiplier") / self._multiplier("residual_multiplier"))

    def attention(self, index: int) -> AttentionConfig:
        return replace(super().attention(index), scale=self._multiplier("attention_multiplier"))


_UNREACHED = 1e30
"""No time step is as large: config files also write infinity as almost the largest value of some type."""


def check_time_steps(config: Mapping[str, Any]) -> None:
    """Rejects limits other than zero and infinity, with which time steps are not limited: no published model has
    others."""
    limits = config.get("time_step_limit")
    if limits is None:
        return
    if not isinstance(limits, (list, tuple)) or len(limits) != 2 or limits[0] != 0 or not _is_infinite(limits[1]):
        raise UnsupportedModel(f"time_step_limit is {limits!r:.80}, which is not supported; supported: [0, inf]")


def _is_infinite(limit: object) -> bool:
    if isinstance(limit, Mapping):
        limit = limit.get("__float__")
    return limit in ("inf", "Infinity") or (isinstance(limit, int | float) and limit >= _UNREACHED)


ATTENTION, MAMBA = ("full_attention", "attention"), ("linear_attention", "mamba")
"""The types of layers: as the reference library writes them, and as published configs have them."""


class GraniteMoeHybrid(Granite):
    """Granite 4: Mamba-2 and attention layers, Granite's multipliers, and a feed-forward block or a mixture of experts
    with a shared one. Models that only have attention layers are of the same family."""

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
        shared_inner, router = count_in(self.raw, "shared_intermediate_size"), RouterRule(gates_shared=False)
        if not self.raw["num_local_experts"]:
            return MLPConfig(self.config.hidden, shared_inner)
        return self.mixture("intermediate_size", "num_local_experts", True, shared_inner=shared_inner, router=router)

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


ARCHITECTURES: Architectures = {"granite": Granite, "granitemoehybrid": GraniteMoeHybrid}
