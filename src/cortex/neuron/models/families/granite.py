"""Granite 3 and 4, dense: Llama's shape with four multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from cortex.neuron.layers.configs import AttentionConfig, NormConfig
from cortex.neuron.models.architecture import EndsConfig
from cortex.neuron.models.config import number_in
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
