"""ERNIE 4.5, dense: Llama's shape. Pairs of adjacent dimensions rotate: the checkpoint puts them apart
(`weights/family_tensors.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cortex.neuron.models.families.llama import Llama


class Ernie45(Llama):
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
