"""What the encoder families share. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from cortex.neuron.layers.configs import Activation, AttentionConfig, MLPConfig, NormConfig, RopeConfig
from cortex.neuron.models.architecture import Architecture, EndsConfig
from cortex.neuron.models.config import DecoderConfig, count_in, layer_count_in, number_in
from cortex.neuron.models.errors import UnsupportedModel
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


class EncoderArchitecture(Architecture):
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

    def mixer(self, index: int) -> AttentionConfig:
        config, bias = self.config, self.has_attention_bias
        return AttentionConfig(
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            rope=self.rope(index),
            bias=bias,
            output_bias=bias,
            window=self.window(index),
            is_causal=False,
        )

    @property
    def has_attention_bias(self) -> bool:
        return True

    def rope(self, index: int) -> RopeConfig | None:
        """How one layer rotates positions; None: it does not."""
        del index
        return None

    def window(self, index: int) -> int | None:
        """The window of one layer: see `AttentionConfig.is_causal`."""
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
