"""ERNIE 4.5, dense and with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cortex.neuron.kernels.moe.rule import RouterRule
from cortex.neuron.layers.configs import MLPConfig, MoEConfig
from cortex.neuron.models.architecture import Architectures
from cortex.neuron.models.config import count_in, optional_count_in
from cortex.neuron.models.families.llama import Llama


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


ARCHITECTURES: Architectures = {"ernie4_5": Ernie45, "ernie4_5_moe": Ernie45Moe}
