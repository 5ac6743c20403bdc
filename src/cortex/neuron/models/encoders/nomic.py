"""nomic-bert: BERT with rotated positions and a gated feed-forward block, without biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from cortex.neuron.layers.configs import MLPConfig, RopeConfig
from cortex.neuron.models.config import read_rope
from cortex.neuron.models.encoders.architecture import EncoderArchitecture, with_options


class NomicBert(EncoderArchitecture):
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 30_528,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "rope_theta": 1_000.0,
    }
    implemented: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "moe_every_n_layers": (0, None),
        "prenorm": (False, None),
        "qkv_proj_bias": (False, None),
        "mlp_fc1_bias": (False, None),
        "rotary_emb_fraction": (1.0, 1, None),
        "rotary_scaling_factor": (None,),
    }

    def __init__(self, raw: Mapping[str, Any]) -> None:
        super().__init__(
            with_options(
                raw,
                hidden_size="n_embd",
                num_hidden_layers="n_layer",
                num_attention_heads="n_head",
                intermediate_size="n_inner",
                hidden_act="activation_function",
                max_position_embeddings="n_positions",
                layer_norm_eps="layer_norm_epsilon",
                rope_theta="rotary_emb_base",
            )
        )

    @property
    def has_attention_bias(self) -> bool:
        return False

    def rope(self, index: int) -> RopeConfig | None:
        del index
        return read_rope(self.raw, self.config.head_dim)

    def feed_forward(self, index: int) -> MLPConfig:
        return replace(super().feed_forward(index), bias=False, output_bias=False, gated=True)
