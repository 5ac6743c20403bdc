"""Command R7B and Command A."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from cortex.neuron.layers.configs import NormConfig, RopeConfig
from cortex.neuron.models.architecture import Architectures, EndsConfig
from cortex.neuron.models.config import count_in, number_in
from cortex.neuron.models.families.llama import Llama
from cortex.neuron.models.layer import BlockNorms


class Cohere2(Llama):
    """Command R7B and Command A: attention and feed-forward block side by side behind one layer norm.

    Every fourth layer has neither a window nor a rotation. In the others pairs of adjacent dimensions rotate: the
    checkpoint puts them apart (`weights/family_tensors.py`).
    """

    feed_forward_norms = BlockNorms()
    defaults: ClassVar[Mapping[str, Any]] = {
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "tie_word_embeddings": True,
    }
    implemented: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "position_embedding_type": ("rope_gptj", None),
        "rotary_pct": (1.0, None),
        "use_gated_activation": (True, None),
        "use_parallel_block": (True, None),
        "use_qk_norm": (False, None),
    }

    @property
    def norm(self) -> NormConfig:
        return NormConfig(number_in(self.raw, "layer_norm_eps", 1e-5), subtracts_mean=True)

    def read_ends(self) -> EndsConfig:
        return EndsConfig(replace(self.norm, scale=number_in(self.raw, "logit_scale", 0.0625)))

    def rope(self, index: int) -> RopeConfig | None:
        return super().rope(index) if self.is_windowed(index) else None

    def is_windowed(self, index: int) -> bool:
        return self.attention_type(index, count_in(self.raw, "sliding_window_pattern")) == "sliding_attention"


ARCHITECTURES: Architectures = {"cohere2": Cohere2}
