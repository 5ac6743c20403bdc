"""Models with latent attention (MLA): all heads share one latent per token, from which keys and values are made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from cortex.neuron.layers.configs import LatentAttentionConfig, NormConfig, RopeConfig, Shard
from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.config import count_in, optional_count_in, read_rope, rope_settings
from cortex.neuron.models.errors import UnsupportedModel
from cortex.neuron.models.families.llama import Llama
from cortex.neuron.models.sharding import MixerConfig

_LATENT_NORM = NormConfig(1e-6)
"""It normalises the low-rank parts, whatever the config has for the others."""


class LatentLlama(Llama):
    """Llama's shape with latent attention."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        """The number and width of key-value heads, which some configs have, mean nothing here."""
        super().__init__({name: raw[name] for name in raw if name not in ("num_key_value_heads", "head_dim")})

    def sharded(self, shard: Shard) -> Architecture:
        part = super().sharded(shard)
        if not shard.is_whole:
            part.notes = (*self.notes, "every device keeps the whole KV cache: attention heads share its latents")
        return part

    def mixer(self, index: int) -> MixerConfig:
        del index
        plain_dims, rope_dims = count_in(self.raw, "qk_nope_head_dim"), count_in(self.raw, "qk_rope_head_dim")
        rope = read_rope(self.raw, rope_dims)
        if rope.dims != rope_dims:
            raise UnsupportedModel(f"the model's config rotates {rope.dims} of {rope_dims} dimensions, not all of them")
        q_rank, bias = optional_count_in(self.raw, "q_lora_rank"), bool(self.raw.get("attention_bias", False))
        if bias and not q_rank:
            raise UnsupportedModel("attention_bias is true without q_lora_rank, which is not supported for this model")
        return LatentAttentionConfig(
            hidden=self.config.hidden,
            heads=self.config.heads,
            latent=count_in(self.raw, "kv_lora_rank"),
            plain_dims=plain_dims,
            rope_dims=rope_dims,
            value_dim=count_in(self.raw, "v_head_dim"),
            scale=(plain_dims + rope_dims) ** -0.5 * self._stretched_scale(rope),
            rope=rope,
            norm=_LATENT_NORM,
            q_rank=q_rank,
            bias=bias,
            output_bias=bias,
            interleaved=bool(self.raw.get("rope_interleave", True)),
        )

    def _stretched_scale(self, rope: RopeConfig) -> float:
        """What a model that was extended to longer contexts multiplies its scores by."""
        weight = rope_settings(self.raw).get("mscale_all_dim")
        factor = float(rope.settings.get("factor") or 1.0)
        if not weight or factor <= 1:
            return 1.0
        return (0.1 * float(weight) * math.log(factor) + 1.0) ** 2


class Youtu(LatentLlama):
    defaults: ClassVar[Mapping[str, Any]] = {
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    }
