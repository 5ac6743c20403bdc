"""Encoders, and the decoders that only make vectors: EuroBERT and jina-embeddings-v5 on top of it or of Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final

from cortex.neuron.layers.configs import Activation, AttentionConfig, MLPConfig, NormConfig, RopeConfig
from cortex.neuron.models.architecture import Architecture, Architectures, EndsConfig
from cortex.neuron.models.config import (
    DecoderConfig,
    UnsupportedModel,
    count_in,
    layer_count_in,
    layer_type_in,
    number_in,
    read_layer_rope,
    read_rope,
    rope_settings,
)
from cortex.neuron.models.families.llama import ATTENTION_TYPES, Llama
from cortex.neuron.models.families.qwen import Qwen3
from cortex.neuron.models.layer import BlockNorms, LayerConfig

ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swiglu": "silu",
}
POSITIONS: Final = "embed_positions"
SEGMENTS: Final = "embed_segments"


class EncoderArchitecture(Llama):
    """A text goes through all layers in one pass, and every token attends to every other one.

    `mixer_norms` and `feed_forward_norms`: the norm `before` a block, or the norm `after` it, which unlike that of a
    decoder is applied to the sum of the block and the residual stream.
    """

    mixer_norms = BlockNorms(after="attn_norm")
    feed_forward_norms = BlockNorms(after="mlp_norm")
    norm_option: ClassVar[str] = "layer_norm_eps"
    activation_option: ClassVar[str] = "hidden_act"
    first_position: int = 0
    """The row of the position embedding for the first token of a text."""

    def read_config(self) -> DecoderConfig:
        raw, heads, hidden = self.raw, count_in(self.raw, "num_attention_heads"), count_in(self.raw, "hidden_size")
        if hidden % heads:
            raise UnsupportedModel(f"{heads} attention heads do not divide a width of {hidden}")
        activation = str(raw.get(self.activation_option))
        if activation not in ACTIVATIONS:
            raise UnsupportedModel(
                f"{self.activation_option} {activation!r} is not supported; supported are {', '.join(ACTIVATIONS)}"
            )
        return DecoderConfig(
            vocab=count_in(raw, "vocab_size"),
            hidden=hidden,
            num_layers=layer_count_in(raw, "num_hidden_layers"),
            heads=heads,
            kv_heads=heads,
            head_dim=count_in(raw, "head_dim", hidden // heads),
            norm_eps=number_in(raw, self.norm_option, 1e-12),
            context_tokens=self.num_positions,
            tied=True,
            activation=ACTIVATIONS[activation],
        )

    @property
    def num_positions(self) -> int:
        """Tokens of the longest text."""
        return count_in(self.raw, "max_position_embeddings")

    @property
    def norm(self) -> NormConfig:
        return NormConfig(self.config.norm_eps, subtracts_mean=True, has_bias=True)

    def read_ends(self) -> EndsConfig:
        tables = {SEGMENTS: count_in(self.raw, "type_vocab_size")} if self.raw.get("type_vocab_size") else {}
        return EndsConfig(self.norm, norms=("embed_norm",), tables=tables)

    def parts_of(self, layer: LayerConfig) -> tuple[AttentionConfig, MLPConfig]:
        """Encoders have no other mixers and feed-forward blocks."""
        assert isinstance(layer.mixer, AttentionConfig)
        assert isinstance(layer.feed_forward, MLPConfig)
        return layer.mixer, layer.feed_forward

    def attention(self, index: int) -> AttentionConfig:
        bias = self.has_attention_bias
        return replace(super().attention(index), bias=bias, output_bias=bias, is_causal=False)

    @property
    def has_attention_bias(self) -> bool:
        return True

    def rope(self, index: int) -> RopeConfig | None:
        del index
        return None

    def feed_forward(self, index: int) -> MLPConfig:
        del index
        config = self.config
        inner = count_in(self.raw, "intermediate_size")
        return MLPConfig(config.hidden, inner, bias=True, output_bias=True, activation=config.activation, gated=False)


def with_options(raw: Mapping[str, Any], **aliases: str) -> dict[str, Any]:
    """`raw` with options under the names of the library where it has them only under those of the GPT-2 config."""
    found = {name: raw[alias] for name, alias in aliases.items() if name not in raw and alias in raw}
    return {**raw, **found}


class Bert(EncoderArchitecture):
    """BERT (bge, e5, mxbai, MiniLM) and XLM-RoBERTa (BGE-M3, multilingual-e5, bge-reranker): learned positions, norms
    after blocks."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 30_522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
    }
    implemented: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "position_embedding_type": ("absolute", None),
        "is_decoder": (False, None),
    }

    def read_ends(self) -> EndsConfig:
        ends = super().read_ends()
        tables = {**ends.tables, POSITIONS: count_in(self.raw, "max_position_embeddings")}
        return EndsConfig(ends.norm, norms=ends.norms, tables=tables)


class Roberta(Bert):
    """The positions of padding come first in its table."""

    defaults: ClassVar[Mapping[str, Any]] = {**Bert.defaults, "vocab_size": 50_265, "pad_token_id": 1}

    @property
    def first_position(self) -> int:  # type: ignore[override]
        padding = self.raw["pad_token_id"]
        return padding + 1 if type(padding) is int and 0 <= padding < 1 << 16 else 0

    @property
    def num_positions(self) -> int:
        return max(1, super().num_positions - self.first_position)


class Gte(EncoderArchitecture):
    """gte-en-v1.5, gte-multilingual and snowflake-arctic-embed-v2: BERT with rotated positions and a gated feed-forward
    block."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **Bert.defaults,
        "vocab_size": 250_048,
        "max_position_embeddings": 8192,
        "type_vocab_size": 1,
        "rope_theta": 160_000.0,
    }
    implemented: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "position_embedding_type": ("rope", None),
        "layer_norm_type": ("layer_norm", None),
        "logn_attention_scale": (False, None),
    }

    def rope(self, index: int) -> RopeConfig | None:
        del index
        settings = rope_settings(self.raw)
        if (settings.get("rope_type") or settings.get("type")) != "ntk":
            return read_rope(self.raw, self.config.head_dim)
        if settings.get("mixed_b") is not None:
            raise UnsupportedModel("rope scaling 'ntk' with mixed_b is not supported")
        # Longer wavelengths by a larger base, and all of them a little longer: a base and a linear factor.
        theta, factor = number_in(self.raw, "rope_theta", 10_000.0), number_in(settings, "factor", 1.0)
        stretch = factor ** (2 / self.config.head_dim)
        scaling = {"rope_theta": theta * factor, "rope_type": "linear", "factor": stretch}
        return read_rope(self.raw, self.config.head_dim, scaling)

    def feed_forward(self, index: int) -> MLPConfig:
        return replace(super().feed_forward(index), bias=False, gated=True)


class NomicBert(EncoderArchitecture):
    """nomic-bert: BERT with rotated positions and a gated feed-forward block, without biases."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **Bert.defaults,
        "vocab_size": 30_528,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
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


class ModernBert(EncoderArchitecture):
    """ModernBERT (gte-modernbert, modernbert-embed): norms before blocks, windows on two layers of three, two
    rotations."""

    mixer_norms = BlockNorms(before="attn_norm")
    feed_forward_norms = BlockNorms(before="mlp_norm")
    norm_option = "norm_eps"
    activation_option = "hidden_activation"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 50_368,
        "hidden_size": 768,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "intermediate_size": 1152,
        "hidden_activation": "gelu",
        "max_position_embeddings": 8192,
        "norm_eps": 1e-5,
        "local_attention": 128,
        "global_attn_every_n_layers": 3,
    }

    @property
    def norm(self) -> NormConfig:
        return NormConfig(self.config.norm_eps, subtracts_mean=True, has_bias=bool(self.raw.get("norm_bias")))

    def read_ends(self) -> EndsConfig:
        return EndsConfig(self.norm, norms=("embed_norm", "norm"))

    def layer(self, index: int) -> LayerConfig:
        layer = super().layer(index)
        return layer if index else replace(layer, mixer_norms=BlockNorms())  # the embedding has a norm already

    @property
    def has_attention_bias(self) -> bool:
        return bool(self.raw.get("attention_bias"))

    def rope(self, index: int) -> RopeConfig | None:
        layer_type = self._type(index)
        name, default = ("global_rope_theta", 160_000.0)
        if layer_type == "sliding_attention":
            name, default = "local_rope_theta", 10_000.0
        theta = number_in(self.raw, name, default)
        return read_layer_rope(self.raw, self.config.head_dim, layer_type, theta)

    def window(self, index: int) -> int | None:
        is_windowed = self._type(index) == "sliding_attention"
        return count_in(self.raw, "local_attention") // 2 + 1 if is_windowed else None

    def feed_forward(self, index: int) -> MLPConfig:
        bias = bool(self.raw.get("mlp_bias"))
        return replace(super().feed_forward(index), bias=bias, output_bias=bias, gated=True)

    def _type(self, index: int) -> str:
        every = count_in(self.raw, "global_attn_every_n_layers")
        return layer_type_in(
            self.raw, index, ATTENTION_TYPES, "sliding_attention" if index % every else "full_attention"
        )


class EuroBert(Llama):
    """Llama whose tokens attend to later ones, too."""

    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}

    def attention(self, index: int) -> AttentionConfig:
        return replace(super().attention(index), is_causal=False)


def jina_embeddings(raw: Mapping[str, Any]) -> Architecture:
    """The small model of jina-embeddings-v5 is a Qwen3, the one that is no decoder a EuroBERT."""
    return EuroBert(raw) if raw.get("is_decoder") is False else Qwen3(raw)


ARCHITECTURES: Architectures = {
    "bert": Bert,
    "camembert": Roberta,
    "eurobert": EuroBert,
    "gte": Gte,
    "jina_embeddings_v5": jina_embeddings,
    "modernbert": ModernBert,
    "new": Gte,
    "nomic_bert": NomicBert,
    "roberta": Roberta,
    "xlm-roberta": Roberta,
}
