"""Gemma 3: norms around every block, a scaled embedding, and two rotations: one for the layers with a window and one
for every sixth layer, which has none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from cortex.neuron.layers.configs import AttentionConfig, NormConfig, QKNormConfig, RopeConfig
from cortex.neuron.models.architecture import EndsConfig
from cortex.neuron.models.config import count_in, number_in, read_layer_rope
from cortex.neuron.models.errors import UnsupportedModel
from cortex.neuron.models.families.llama import Llama
from cortex.neuron.models.layer import BlockNorms
from cortex.neuron.models.text_part import TextPart


class Gemma3(Llama):
    mixer_norms = BlockNorms(before="input_layernorm", after="post_attention_layernorm")
    feed_forward_norms = BlockNorms(before="pre_feedforward_layernorm", after="post_feedforward_layernorm")
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    }
    implemented: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "attn_logit_softcapping": (None,),
    }

    @property
    def norm(self) -> NormConfig:
        return NormConfig(self.config.norm_eps, zero_centred=True)

    def read_ends(self) -> EndsConfig:
        cap = self.raw.get("final_logit_softcapping")
        cap = None if cap is None else number_in(self.raw, "final_logit_softcapping", cap)
        return EndsConfig(self.norm, self.config.hidden**0.5, logit_cap=cap)

    def attention(self, index: int) -> AttentionConfig:
        scale = number_in(self.raw, "query_pre_attn_scalar", 256.0) ** -0.5
        is_causal = not self._is_bidirectional
        return replace(super().attention(index), scale=scale, qk_norm=QKNormConfig(self.norm), is_causal=is_causal)

    def rope(self, index: int) -> RopeConfig | None:
        layer_type = self._type(index)
        is_windowed = layer_type == "sliding_attention"
        name, default = ("rope_local_base_freq", 10_000.0) if is_windowed else ("rope_theta", 1_000_000.0)
        theta = number_in(self.raw, name, default)
        return read_layer_rope(self.raw, self.config.head_dim, layer_type, theta)

    def window(self, index: int) -> int | None:
        if self._type(index) != "sliding_attention":
            return None
        window = count_in(self.raw, "sliding_window")
        return window // 2 + 1 if self._is_bidirectional else window

    @property
    def _is_bidirectional(self) -> bool:
        """Whether tokens attend to later ones, as in EmbeddingGemma. Raises UnsupportedModel for a model that generates
        text."""
        is_bidirectional = bool(self.raw.get("use_bidirectional_attention"))
        if is_bidirectional and self.pooling is None:
            raise UnsupportedModel(
                "use_bidirectional_attention is True: the model attends to later tokens, so it generates no text, and "
                "it has no modules.json for embeddings"
            )
        return is_bidirectional

    def _type(self, index: int) -> str:
        return self.attention_type(index, count_in(self.raw, "sliding_window_pattern"))


class Gemma3Multimodal(TextPart, Gemma3):
    def attention(self, index: int) -> AttentionConfig:
        return replace(super().attention(index), whole_pictures=True)
