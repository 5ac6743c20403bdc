"""GLM-4: norms around every block. Half of each head rotates, in pairs of adjacent dimensions: the checkpoint puts them
apart (`weights/family_tensors.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from cortex.neuron.layers.configs import AttentionConfig
from cortex.neuron.models.families.llama import Llama
from cortex.neuron.models.layer import BlockNorms


class Glm4(Llama):
    mixer_norms = BlockNorms(before="input_layernorm", after="post_self_attn_layernorm")
    feed_forward_norms = BlockNorms(before="post_attention_layernorm", after="post_mlp_layernorm")
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1.5625e-07,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    }

    def attention(self, index: int) -> AttentionConfig:
        return replace(super().attention(index), output_bias=False)
