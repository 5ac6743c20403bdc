"""Gemma 3 and 4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from cortex.neuron.layers.configs import (
    AttentionConfig,
    KVOrigin,
    MLPConfig,
    MoEConfig,
    NormConfig,
    PerLayerInputConfig,
    PerLayerInputsConfig,
    QKNormConfig,
    RopeConfig,
)
from cortex.neuron.models.architecture import Architectures, EndsConfig, TextPart
from cortex.neuron.models.config import (
    UnsupportedModel,
    count_in,
    number_in,
    optional_count_in,
    read_layer_rope,
)
from cortex.neuron.models.families.llama import Llama
from cortex.neuron.models.layer import BlockNorms, LayerConfig


class Gemma3(Llama):
    """Gemma 3: norms around every block, a scaled embedding, and two rotations: one for the layers with a window and
    one for every sixth layer, which has none."""

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

    def is_windowed(self, index: int) -> bool:
        return self._type(index) == "sliding_attention"

    def window(self, index: int) -> int | None:
        window = super().window(index)
        return window // 2 + 1 if window is not None and self._is_bidirectional else window

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


_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_PATTERN = 6
"""Every sixth layer has no window, in configs that do not list them."""


class Gemma4(Llama):
    """Gemma 4: Gemma 3's norms and windows, with wider heads in layers without a window, which may have one projection
    for keys and values. Some models have experts parallel to the feed-forward block of each layer. The E models
    have inputs of their own for every layer, and their last layers attend to the keys and values of earlier
    ones."""

    mixer_norms = BlockNorms(before="input_layernorm", after="post_attention_layernorm")
    feed_forward_norms = BlockNorms(before="pre_feedforward_layernorm", after="post_feedforward_layernorm")
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "tie_word_embeddings": True,
    }
    implemented: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (None, "vision"),
    }

    def read_ends(self) -> EndsConfig:
        cap = self.raw.get("final_logit_softcapping")
        cap = None if cap is None else number_in(self.raw, "final_logit_softcapping", cap)
        inputs = self._per_layer_inputs()
        return EndsConfig(self.norm, self.config.hidden**0.5, logit_cap=cap, per_layer_inputs=inputs)

    def layer(self, index: int) -> LayerConfig:
        size = optional_count_in(self.raw, "hidden_size_per_layer_input")
        return replace(
            super().layer(index),
            experts=self._experts() if self.raw.get("enable_moe_block") else None,
            per_layer_input=PerLayerInputConfig(self.config.hidden, size, self.norm) if size else None,
            has_factor=True,
        )

    def attention(self, index: int) -> AttentionConfig:
        kv_heads, head_dim = self._kv_sizes(index)
        if self.config.heads % kv_heads:
            raise UnsupportedModel(
                f"{self.config.heads} attention heads cannot share {kv_heads} key-value heads evenly"
            )
        return replace(
            super().attention(index),
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=1.0,
            kv=self._kv_origin(index),
            qk_norm=QKNormConfig(self.norm),
            norms_values=True,
        )

    def rope(self, index: int) -> RopeConfig | None:
        layer_type = self._type(index)
        ropes = {"rope_parameters": _ROPES} if self.raw.get("rope_parameters") is None else {}
        return read_layer_rope({**self.raw, **ropes}, self._kv_sizes(index)[1], layer_type, 10_000.0)

    def is_windowed(self, index: int) -> bool:
        return self._type(index) == "sliding_attention"

    def feed_forward(self, index: int) -> MLPConfig:
        inner = count_in(self.raw, "intermediate_size")
        is_wide = self.raw.get("use_double_wide_mlp") and index >= self._first_reader > 0
        return MLPConfig(self.config.hidden, 2 * inner if is_wide else inner, activation=self.config.activation)

    def _type(self, index: int) -> str:
        """The last layer never has a window."""
        listed = self.attention_type(index, _PATTERN)
        return "full_attention" if index == self.config.num_layers - 1 else listed

    @property
    def _first_reader(self) -> int:
        """The first of the layers that have no keys and values of their own."""
        num_readers = optional_count_in(self.raw, "num_kv_shared_layers")
        if num_readers >= self.config.num_layers:
            raise UnsupportedModel(
                f"num_kv_shared_layers is {num_readers} of {self.config.num_layers} layers; at least one must have "
                "keys and values of its own"
            )
        return self.config.num_layers - num_readers

    def _kv_origin(self, index: int) -> KVOrigin:
        if index < self._first_reader:
            has_own_values = self._type(index) == "sliding_attention" or not self.raw.get("attention_k_eq_v")
            return "projected" if has_own_values else "keys"
        same = [earlier for earlier in range(self._first_reader) if self._type(earlier) == self._type(index)]
        if not same:
            raise UnsupportedModel(
                f"num_kv_shared_layers is {self.config.num_layers - self._first_reader}: no layer before has "
                f"{self._type(index)} with keys and values of its own"
            )
        return same[-1]

    def _kv_sizes(self, index: int) -> tuple[int, int]:
        """Key-value heads, and the size of a head. Configs name those of layers without a window, or list layers."""
        config, listed = self.config, self.raw.get("per_layer_config")
        if listed is not None:
            own = listed.get(str(index), {})
            if unknown := own.keys() - {"head_dim", "num_key_value_heads"}:
                raise UnsupportedModel(f"per_layer_config has {min(unknown)!r}: {own!r:.80}, which is not supported")
            return count_in(own, "num_key_value_heads", config.kv_heads), count_in(own, "head_dim", config.head_dim)
        if self._type(index) == "sliding_attention":
            return config.kv_heads, config.head_dim
        kv_heads = config.kv_heads
        if self.raw.get("attention_k_eq_v"):
            kv_heads = count_in(self.raw, "num_global_key_value_heads", kv_heads)
        return kv_heads, count_in(self.raw, "global_head_dim", 512)

    def _experts(self) -> MoEConfig:
        return self.mixture(
            "moe_intermediate_size",
            "num_experts",
            True,
            top_k="top_k_experts",
            activation=self.config.activation,
            router_norm=NormConfig(self.config.norm_eps, scale=self.config.hidden**-0.5),
            scales_experts=True,
        )

    def _per_layer_inputs(self) -> PerLayerInputsConfig | None:
        """The sum of two parts is divided by √2. The embedding's is scaled by √size. That of the projection is scaled
        by 1/√hidden before its norm, which only the norm's `eps` notices."""
        size, config = optional_count_in(self.raw, "hidden_size_per_layer_input"), self.config
        if not size:
            return None
        vocab = count_in(self.raw, "vocab_size_per_layer_input")
        if vocab < config.vocab:
            raise UnsupportedModel(
                f"vocab_size_per_layer_input is {vocab}, which is less than the vocabulary of {config.vocab} tokens"
            )
        norm = NormConfig(config.norm_eps * config.hidden, scale=0.5**0.5)
        return PerLayerInputsConfig(vocab, config.hidden, size, config.num_layers, norm, (size / 2) ** 0.5)


class Gemma4Unified(Gemma4):
    """Without experts and without inputs of its own for a layer."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **Gemma4.defaults,
        "max_position_embeddings": 262_144,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    }


class Gemma4Multimodal(TextPart, Gemma4):
    def attention(self, index: int) -> AttentionConfig:
        """In the larger models, positions of a picture see each other in layers with a window."""
        is_whole = self.raw.get("use_bidirectional_attention") == "vision" and self._sees_whole(index)
        return replace(super().attention(index), whole_pictures=is_whole)

    def _sees_whole(self, index: int) -> bool:
        return self.is_windowed(index)


class Gemma4UnifiedMultimodal(Gemma4Multimodal, Gemma4Unified):
    """Positions of a picture see each other in all layers."""

    defaults: ClassVar[Mapping[str, Any]] = {**Gemma4Unified.defaults, "use_bidirectional_attention": "vision"}

    def _sees_whole(self, index: int) -> bool:
        del index
        return True


ARCHITECTURES: Architectures = {
    "gemma3": Gemma3Multimodal,
    "gemma3_text": Gemma3,
    "gemma4": Gemma4Multimodal,
    "gemma4_text": Gemma4,
    "gemma4_unified": Gemma4UnifiedMultimodal,
    "gemma4_unified_text": Gemma4Unified,
}
