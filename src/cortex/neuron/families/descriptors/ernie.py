"""ERNIE 4.5, dense and with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cortex.neuron.families.family import THINK, ModelFamily
from cortex.neuron.families.gguf import (
    SHARED_EXPERT,
    SOFTMAX,
    GGUFArchitecture,
    GGUFKeys,
    check_scoring,
    num_dense,
    optional_count,
)


def _ernie4_5_moe(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    check_scoring(keys, SOFTMAX)
    return {
        "moe_num_experts": config["num_experts"],
        "moe_k": config["num_experts_per_tok"],
        "moe_num_shared_experts": optional_count(keys, "expert_shared_count"),
        "moe_layer_start_index": num_dense(keys),
        "moe_layer_interval": keys.count("interleave_moe_layer_step", 1),
    }


FAMILIES: Final = (
    ModelFamily(
        ("ernie4_5",), "ERNIE 4.5, dense", rotates_neighbours=True, head_dim=128, gguf=(GGUFArchitecture("ernie4_5"),)
    ),
    ModelFamily(
        ("ernie4_5_moe",),
        "ERNIE 4.5",
        tensor_names={
            ".mlp.moe_statics.": ".mlp.gate.",
            ".mlp.gate.moe_statics.": ".mlp.gate.",
            ".mlp.shared_experts.": ".mlp.shared_expert.",
        },
        rotates_neighbours=True,
        reasoning=THINK,
        gguf=(GGUFArchitecture("ernie4_5-moe", _ernie4_5_moe, SHARED_EXPERT, is_mixture=True),),
    ),
)
