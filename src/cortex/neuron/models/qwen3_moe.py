"""Qwen3-MoE: Qwen3 with a mixture of experts in place of most layers' feed-forward block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cortex.neuron.layers.configs import MLPConfig, MoEConfig
from cortex.neuron.models.config import count_in, optional_count_in
from cortex.neuron.models.errors import UnsupportedModel
from cortex.neuron.models.qwen3 import Qwen3

_MAX_EXPERTS = 1 << 12
"""Far above every published model; bounds what a damaged config can make a node compute."""


class Qwen3Moe(Qwen3):
    def feed_forward(self, index: int) -> MLPConfig | MoEConfig:
        return read_moe(self.raw, index, self.config.hidden) or super().feed_forward(index)


def read_moe(config: Mapping[str, Any], index: int, hidden: int) -> MoEConfig | None:
    """The experts of one layer; None for a dense layer. Raises UnsupportedModel for numbers that contradict."""
    # Published configs have the first spelling, newer versions of the reference library write the second.
    experts = optional_count_in(config, "num_experts") or optional_count_in(config, "num_local_experts")
    if not experts or index in (config.get("mlp_only_layers") or ()):
        return None
    if (index + 1) % (optional_count_in(config, "decoder_sparse_step") or 1):
        return None
    if experts > _MAX_EXPERTS:
        raise UnsupportedModel(f"the model's config has {experts} experts; at most {_MAX_EXPERTS} are supported")
    top_k = count_in(config, "num_experts_per_tok")
    if top_k > experts:
        raise UnsupportedModel(f"the model's config asks for {top_k} of {experts} experts; is it complete?")
    return MoEConfig(
        hidden=hidden,
        inner=count_in(config, "moe_intermediate_size"),
        experts=experts,
        top_k=top_k,
        renormalise=bool(config.get("norm_topk_prob", False)),
        shared_inner=optional_count_in(config, "shared_expert_intermediate_size"),
    )
