"""The part of a model's config that all families share, read from the shape of `config.json`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cortex.neuron.layers.configs import SCALINGS, Activation, RopeConfig
from cortex.neuron.models.errors import UnsupportedModel

ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""`hidden_act` in a model's config → the activation."""
_MAX_LAYERS = 1_000
"""Far above every published model; bounds what a damaged config can make a node compute."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes that all families share; a family reads its own extras from the raw config."""

    vocab: int
    hidden: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    context_tokens: int
    tied: bool
    activation: Activation

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Raises UnsupportedModel for a field that is missing, is invalid, or asks for what is not built."""
        heads = count_in(config, "num_attention_heads")
        kv_heads = count_in(config, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise UnsupportedModel(f"{heads} attention heads cannot share {kv_heads} key-value heads evenly")
        hidden = count_in(config, "hidden_size")
        activation = str(config.get("hidden_activation") or config.get("hidden_act") or "silu")
        if activation not in ACTIVATIONS:
            raise UnsupportedModel(
                f"hidden_act {activation!r} is not supported; supported are {', '.join(ACTIVATIONS)}"
            )
        num_layers = count_in(config, "num_hidden_layers")
        if num_layers > _MAX_LAYERS:
            raise UnsupportedModel(f"the model's config has {num_layers} layers; at most {_MAX_LAYERS} are supported")
        return cls(
            vocab=count_in(config, "vocab_size"),
            hidden=hidden,
            num_layers=num_layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=count_in(config, "head_dim", hidden // heads),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            context_tokens=count_in(config, "max_position_embeddings"),
            tied=bool(config.get("tie_word_embeddings", False)),
            activation=ACTIVATIONS[activation],
        )


def count_in(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """The positive integer that the config has under `name`. Raises UnsupportedModel."""
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise UnsupportedModel(f"the model's config has no {name!r}")
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"the model's config has {value!r} for {name!r}; it must be a positive integer")
    return value


def read_rope(config: Mapping[str, Any], head_dim: int, layer_type: str | None = None) -> RopeConfig:
    """Both spellings: `rope_theta` beside `rope_scaling`, and everything in `rope_parameters`, where each `layer_type`
    may have its own."""
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(settings, Mapping) and layer_type in settings:
        settings = settings[layer_type] or {}
    if not isinstance(settings, Mapping):
        raise UnsupportedModel(f"the model's config has {settings!r} for its rope parameters; they are an object")
    scaling = str(settings.get("rope_type") or settings.get("type") or "default")
    if scaling not in SCALINGS:
        raise UnsupportedModel(f"rope scaling {scaling!r} is not supported; supported are {', '.join(SCALINGS)}")
    for name in SCALINGS[scaling]:
        if not isinstance(settings.get(name), int | float):
            raise UnsupportedModel(
                f"rope scaling {scaling!r} needs the number {name!r}, which the config does not have"
            )
    theta = settings.get("rope_theta") or config.get("rope_theta") or 10_000.0
    fraction = settings.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    return RopeConfig(
        dims=int(head_dim * float(fraction)),
        theta=float(theta),
        scaling=scaling,
        settings=settings,
        trained_tokens=int(config.get("max_position_embeddings") or 0),
    )
