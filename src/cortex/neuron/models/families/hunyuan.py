"""Hunyuan, dense: Llama's shape with norms on every query and key head after the rotation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from cortex.neuron.layers.configs import AttentionConfig, QKNormConfig, RopeConfig
from cortex.neuron.models.config import read_rope, rope_settings
from cortex.neuron.models.families.llama import Llama


class HunyuanDense(Llama):
    defaults: ClassVar[Mapping[str, Any]] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}

    def attention(self, index: int) -> AttentionConfig:
        return replace(super().attention(index), qk_norm=QKNormConfig(self.norm, after_rope=True))

    def rope(self, index: int) -> RopeConfig | None:
        """A `dynamic` scaling with a fixed `alpha` is a larger theta."""
        settings = rope_settings(self.raw)
        alpha = settings.get("alpha")
        if settings.get("rope_type", settings.get("type")) != "dynamic" or not alpha:
            return super().rope(index)
        dim = self.config.head_dim
        theta = float(settings.get("rope_theta") or self.raw.get("rope_theta") or 10_000.0)
        return read_rope(self.raw, dim, {"rope_theta": theta * alpha ** (dim / (dim - 2))})
