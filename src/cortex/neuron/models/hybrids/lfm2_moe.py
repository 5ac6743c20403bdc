"""LFM2-MoE: LFM2 with a mixture of experts in all but the first layers, chosen by a sigmoid router with a bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cortex.neuron.kernels.moe.rule import RouterRule
from cortex.neuron.layers.configs import MLPConfig, MoEConfig
from cortex.neuron.models.config import count_in, number_in, optional_count_in
from cortex.neuron.models.hybrids.lfm2 import Lfm2
from cortex.neuron.models.mixtures.routed import routed


class Lfm2Moe(Lfm2):
    defaults: ClassVar[Mapping[str, Any]] = {
        **Lfm2.defaults,
        "block_auto_adjust_ff_dim": False,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    }

    def feed_forward(self, index: int) -> MLPConfig | MoEConfig:
        if index < optional_count_in(self.raw, "num_dense_layers"):
            return MLPConfig(self.config.hidden, count_in(self.raw, "intermediate_size"))
        return routed(
            self.config.hidden,
            count_in(self.raw, "moe_intermediate_size"),
            count_in(self.raw, "num_experts"),
            count_in(self.raw, "num_experts_per_tok"),
            bool(self.raw["norm_topk_prob"]),
            router=RouterRule("sigmoid", number_in(self.raw, "routed_scaling_factor", 1.0)),
            has_bias=bool(self.raw["use_expert_bias"]),
        )
