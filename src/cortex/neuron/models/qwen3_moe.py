"""Qwen3-MoE: Qwen3 with a mixture of experts in place of most layers' feed-forward block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cortex.neuron.layers.moe import MoE, MoEConfig
from cortex.neuron.models.errors import UnsupportedModel
from cortex.neuron.models.llama import FeedForward
from cortex.neuron.models.qwen3 import Qwen3


class Qwen3Moe(Qwen3):
    def feed_forward(self, index: int, prefix: str) -> FeedForward:
        if not is_sparse(self.raw, index):
            return super().feed_forward(index, prefix)
        return MoE(self.parameters, read_moe(self.raw, self.config.hidden), prefix)


def is_sparse(config: Mapping[str, Any], index: int) -> bool:
    """Whether a layer has experts."""
    if index in (config.get("mlp_only_layers") or ()) or not num_experts(config):
        return False
    return (index + 1) % int(config.get("decoder_sparse_step") or 1) == 0


def num_experts(config: Mapping[str, Any]) -> int:
    """Both spellings: the published configs' and the one that newer reference libraries write."""
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)


def read_moe(config: Mapping[str, Any], hidden: int) -> MoEConfig:
    """Raises UnsupportedModel where the numbers cannot be."""
    try:
        experts, top_k = num_experts(config), int(config["num_experts_per_tok"])
        if not 0 < top_k <= experts:
            raise UnsupportedModel(f"the model's config asks for {top_k} of {experts} experts; is it whole?")
        return MoEConfig(
            hidden=hidden,
            inner=int(config["moe_intermediate_size"]),
            experts=experts,
            top_k=top_k,
            renormalise=bool(config.get("norm_topk_prob", False)),
            shared_inner=int(config.get("shared_expert_intermediate_size") or 0),
        )
    except KeyError as missing:
        raise UnsupportedModel(f"the model's config has no {missing.args[0]!r}") from None
