"""What every decoder's config says, read once from the checkpoint's `config.json` shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cortex.neuron.layers.rope import SUPPORTED_SCALING, RopeConfig
from cortex.neuron.models.registry import UnsupportedModel


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes that all families share; a family reads its own extras from the raw config."""

    vocab: int
    hidden: int
    inner: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    context_tokens: int
    tied: bool
    rope: RopeConfig

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Raises UnsupportedModel where a field is missing or asks for what is not built."""
        try:
            heads = int(config["num_attention_heads"])
            hidden = int(config["hidden_size"])
            activation = config.get("hidden_act", "silu")
            if activation != "silu":
                raise UnsupportedModel(f"hidden_act {activation!r} is not supported; only 'silu' is")
            head_dim = int(config.get("head_dim") or hidden // heads)
            return cls(
                vocab=int(config["vocab_size"]),
                hidden=hidden,
                inner=int(config.get("intermediate_size") or 0),
                num_layers=int(config["num_hidden_layers"]),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=head_dim,
                norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                context_tokens=int(config["max_position_embeddings"]),
                tied=bool(config.get("tie_word_embeddings", False)),
                rope=read_rope(config, head_dim),
            )
        except KeyError as missing:
            raise UnsupportedModel(f"the model's config has no {missing.args[0]!r}") from None


def read_rope(config: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """Both spellings: `rope_theta` beside `rope_scaling`, and everything in `rope_parameters`."""
    settings = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    scaling = str(settings.get("rope_type") or settings.get("type") or "default")
    if scaling not in SUPPORTED_SCALING:
        raise UnsupportedModel(f"rope scaling {scaling!r} is not supported; supported are {SUPPORTED_SCALING}")
    theta = settings.get("rope_theta") or config.get("rope_theta") or 10_000.0
    fraction = settings.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    return RopeConfig(
        dims=int(head_dim * float(fraction)),
        theta=float(theta),
        scaling=scaling,
        settings=settings,
        trained_tokens=int(config.get("max_position_embeddings") or 0),
    )
