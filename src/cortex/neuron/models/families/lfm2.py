"""LFM2: most layers are gated short convolutions, some are attention; dense and with experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from cortex.neuron.kernels.moe.rule import RouterRule
from cortex.neuron.layers.configs import AttentionConfig, MLPConfig, MoEConfig, QKNormConfig
from cortex.neuron.layers.recurrent.configs import RecurrentConfig, ShortConvConfig
from cortex.neuron.models.architecture import Architectures
from cortex.neuron.models.config import UnsupportedModel, count_in, layer_type_in, number_in, optional_count_in
from cortex.neuron.models.families.llama import Llama

LAYER_TYPES = ("conv", "full_attention")


class Lfm2(Llama):
    """Published configs have `block_ff_dim` and `tie_embedding` for the width of the feed-forward block and the tied
    embedding, newer versions of the reference library write the usual names."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 128_000,
        "norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "conv_L_cache": 3,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    }
    implemented: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "block_use_swiglu": (True, None),
        "conv_bias": (False,),
        "hidden_act": ("silu",),
        "use_pos_enc": (True, None),
    }

    def __init__(self, raw: Mapping[str, Any]) -> None:
        given = {**self.defaults, **raw}
        own = {"rms_norm_eps": given["norm_eps"]}
        if "tie_embedding" in raw:
            own["tie_word_embeddings"] = raw["tie_embedding"]
        if "block_ff_dim" in raw:
            own["intermediate_size"] = raw["block_ff_dim"]
        super().__init__({**raw, **own})

    def mixer(self, index: int) -> AttentionConfig | RecurrentConfig:
        if self._layer_type(index) == "full_attention":
            return self.attention(index)
        return ShortConvConfig(self.config.hidden, self.config.hidden, count_in(self.raw, "conv_L_cache"))

    def attention(self, index: int) -> AttentionConfig:
        return replace(super().attention(index), bias=False, output_bias=False, qk_norm=QKNormConfig(self.norm))

    def feed_forward(self, index: int) -> MLPConfig | MoEConfig:
        del index
        inner = count_in(self.raw, "intermediate_size")
        if self.raw["block_auto_adjust_ff_dim"]:
            inner = 2 * inner // 3
            if self.raw["block_ffn_dim_multiplier"] is not None:
                inner = int(number_in(self.raw, "block_ffn_dim_multiplier", 1.0) * inner)
                multiple = count_in(self.raw, "block_multiple_of")
                inner = multiple * -(-inner // multiple)
        return MLPConfig(self.config.hidden, inner)

    def _layer_type(self, index: int) -> str:
        """Listed by the config, or the layers with attention are. Raises UnsupportedModel."""
        attentions = self.raw.get("full_attn_idxs")
        if attentions is None:
            return layer_type_in(self.raw, index, LAYER_TYPES, "full_attention")
        if not isinstance(attentions, Sequence):
            raise UnsupportedModel(f"full_attn_idxs is {attentions!r:.80}; it must be a list of layers")
        return layer_type_in(self.raw, index, LAYER_TYPES, "full_attention" if index in attentions else "conv")


class Lfm2Moe(Lfm2):
    """LFM2-MoE: LFM2 with a mixture of experts in all but the first layers, chosen by a sigmoid router with a bias."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **Lfm2.defaults,
        "block_auto_adjust_ff_dim": False,
        "moe_intermediate_size": 1792,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    }

    def feed_forward(self, index: int) -> MLPConfig | MoEConfig:
        if index < optional_count_in(self.raw, "num_dense_layers"):
            return MLPConfig(self.config.hidden, count_in(self.raw, "intermediate_size"))
        return self.mixture(
            "moe_intermediate_size",
            "num_experts",
            bool(self.raw["norm_topk_prob"]),
            router=RouterRule("sigmoid", number_in(self.raw, "routed_scaling_factor", 1.0)),
            has_bias=bool(self.raw["use_expert_bias"]),
        )


ARCHITECTURES: Architectures = {"lfm2": Lfm2, "lfm2_moe": Lfm2Moe}
