"""Muse Glimmer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from cortex.neuron.layers.configs import AttentionConfig, GateConfig, NormConfig, QKNormConfig, RopeConfig
from cortex.neuron.models.architecture import Architectures, EndsConfig, TextPart
from cortex.neuron.models.config import UnsupportedModel, layer_type_in, number_in
from cortex.neuron.models.families.llama import ATTENTION_TYPES, Llama
from cortex.neuron.models.layer import BlockNorms

_AFTER_EPS = 1e-8


class MuseGlimmer(Llama):
    """Muse Glimmer: norms around every block, normed embeddings, a gate of attention's output with a projection of its
    own, a window on three layers of four, and no rotation on the fourth."""

    mixer_norms = BlockNorms("input_layernorm", "post_attention_layernorm", _AFTER_EPS)
    feed_forward_norms = BlockNorms("pre_feedforward_layernorm", "post_feedforward_layernorm", _AFTER_EPS)
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "sliding_window": 2048,
    }
    implemented: ClassVar[Mapping[str, tuple[Any, ...]]] = {"post_norm_eps": (_AFTER_EPS, None)}

    @property
    def norm(self) -> NormConfig:
        return NormConfig(self.config.norm_eps, zero_centred=True)

    def read_ends(self) -> EndsConfig:
        scale = number_in(self.raw, "output_multiplier", 0.19611613513818404)
        return EndsConfig(
            NormConfig(self.config.norm_eps, scale=scale),
            embedding_eps=self.config.norm_eps,
            logit_cap=number_in(self.raw, "final_logit_softcapping", 20.0),
        )

    def attention(self, index: int) -> AttentionConfig:
        """Files of other programs have the scale of queries as the weight of a norm."""
        plain, is_weighted = super().attention(index), bool(self.raw.get("qk_norm_weights"))
        return replace(
            plain,
            scale=plain.scale * number_in(self.raw, "qk_scale_factor", 3.87),
            qk_norm=QKNormConfig(
                NormConfig(self.config.norm_eps, zero_centred=is_weighted, weightless=not is_weighted)
            ),
            gate=GateConfig("gate_proj"),
        )

    def rope(self, index: int) -> RopeConfig | None:
        listed = self.raw.get("layer_rope_theta")
        if listed is None:
            return None if self._is_fourth(index) else super().rope(index)
        if not isinstance(listed, list) or len(listed) != self.config.num_layers:
            raise UnsupportedModel(f"layer_rope_theta must have {self.config.num_layers} values: {listed!r:.80}")
        return super().rope(index) if listed[index] else None

    def is_windowed(self, index: int) -> bool:
        default = "full_attention" if self._is_fourth(index) else "sliding_attention"
        return layer_type_in(self.raw, index, ATTENTION_TYPES, default) == "sliding_attention"

    def _is_fourth(self, index: int) -> bool:
        """Counted from the last layer, which is one."""
        return (self.config.num_layers - 1 - index) % 4 == 0


class MuseGlimmerMultimodal(TextPart, MuseGlimmer):
    pass


ARCHITECTURES: Architectures = {"muse_glimmer": MuseGlimmerMultimodal, "muse_glimmer_text": MuseGlimmer}
