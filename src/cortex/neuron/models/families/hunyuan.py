"""Hunyuan, dense: Llama's shape with norms on every query and key head after the rotation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from cortex.neuron.layers.configs import AttentionConfig, QKNormConfig, RopeConfig
from cortex.neuron.models.config import number_in, read_rope, rope_settings
from cortex.neuron.models.families.llama import Llama


class HunyuanDense(Llama):
    defaults: ClassVar[Mapping[str, Any]] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
    implemented: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "norm_type": ("rms", "hf_rms", None),
        "use_cla": (False, None),
        "use_mla": (False, None),
        "use_qk_norm": (True, None),
        "use_rotary_pos_emb": (True, None),
    }

    def attention(self, index: int) -> AttentionConfig:
        return replace(super().attention(index), qk_norm=QKNormConfig(self.norm, after_rope=True))

    def rope(self, index: int) -> RopeConfig | None:
        """A `dynamic` scaling with a fixed `alpha` is a larger theta."""
        settings = rope_settings(self.raw)
        dim = self.config.head_dim
        if settings.get("rope_type", settings.get("type")) != "dynamic" or not settings.get("alpha") or dim <= 2:
            return super().rope(index)
        theta = number_in(settings if settings.get("rope_theta") else self.raw, "rope_theta", 10_000.0)
        stretched = theta * number_in(settings, "alpha", 1.0) ** (dim / (dim - 2))
        return read_rope(self.raw, dim, {"rope_theta": stretched})
