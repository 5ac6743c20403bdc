"""The part of a model's config that all families share, read from the shape of `config.json`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cortex.neuron.layers.configs import SCALINGS, Activation, MoEConfig, RopeConfig


class UnsupportedModel(Exception):
    """The checkpoint's family, or an option of it, is not supported by this engine."""


ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""`hidden_act` in a model's config → the activation."""
_MAX_LAYERS = 1_000
"""Far above every published model; bounds what a damaged config can make a node compute."""
_MAX_COUNT = 1 << 40
_MAX_NUMBER = 1e30
"""The limit of settings that are not counts; keeps calculations in float32 finite."""
_OPTIONAL_ROPE = (
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
)


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
        """Raises UnsupportedModel for a field that is missing, invalid or not supported."""
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
        return cls(
            vocab=count_in(config, "vocab_size"),
            hidden=hidden,
            num_layers=layer_count_in(config, "num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=count_in(config, "head_dim", hidden // heads),
            norm_eps=number_in(config, "rms_norm_eps", 1e-6),
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
    if type(value) is not int or not 0 < value <= _MAX_COUNT:  # no bool
        raise UnsupportedModel(f"the model's config has {value!r:.80} for {name!r}; it must be a positive integer")
    return value


def layer_count_in(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """As `count_in`, for layers: each of them is computed with before a tensor is looked at."""
    count = count_in(config, name, default)
    if count > _MAX_LAYERS:
        raise UnsupportedModel(f"the model's config has {count} layers; at most {_MAX_LAYERS} are supported")
    return count


def optional_count_in(config: Mapping[str, Any], name: str) -> int:
    """As `count_in`; 0 if the config has none, or zero."""
    return count_in(config, name) if config.get(name) else 0


def number_in(config: Mapping[str, Any], name: str, default: float) -> float:
    """The positive number that the config has under `name`. Raises UnsupportedModel."""
    value = config.get(name)
    if value is None:
        value = default
    if not is_positive(value):
        raise UnsupportedModel(f"the model's config has {value!r:.80} for {name!r}; it must be a positive number")
    return float(value)


def is_positive(value: Any) -> bool:
    """Whether `value` is a number that calculations with floats can use."""
    return type(value) in (int, float) and 0 < value < _MAX_NUMBER


def layer_type_in(config: Mapping[str, Any], index: int, allowed: Sequence[str], default: str) -> str:
    """The type of one layer in `layer_types`, which names one of `allowed` for each; without the list, `default`.

    Raises UnsupportedModel.
    """
    types = config.get("layer_types")
    if not types:
        return default
    num_layers = config.get("num_hidden_layers")
    if len(types) != num_layers or not set(types) <= set(allowed):
        raise UnsupportedModel(f"layer_types must name {num_layers} layers, {' or '.join(allowed)}: {types}")
    return str(types[index])


def rope_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Both spellings: `rope_theta` next to `rope_scaling`, and everything in `rope_parameters`.

    Raises UnsupportedModel.
    """
    settings = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(settings, Mapping):
        raise UnsupportedModel(f"the model's config has {settings!r} for its rope parameters; they are an object")
    return settings


def read_rope(config: Mapping[str, Any], head_dim: int, settings: Mapping[str, Any] | None = None) -> RopeConfig:
    """`settings`: in place of the config's `rope_settings`. Raises UnsupportedModel."""
    settings = rope_settings(config) if settings is None else settings
    scaling = str(settings.get("rope_type") or settings.get("type") or "default")
    if scaling not in SCALINGS:
        raise UnsupportedModel(f"rope scaling {scaling!r} is not supported; supported are {', '.join(SCALINGS)}")
    for name in SCALINGS[scaling]:
        value = settings.get(name)
        # The logarithm of the original length divides there.
        if value is None or not is_positive(value) or (scaling == "longrope" and value <= 1):
            stated = "which the config does not have" if value is None else f"and the model's config has {value!r:.80}"
            raise UnsupportedModel(f"rope scaling {scaling!r} needs the number {name!r}, {stated}")
    for name in _OPTIONAL_ROPE:
        if settings.get(name) and not is_positive(settings[name]):
            raise UnsupportedModel(f"the model's config has {settings[name]!r:.80} for {name!r} of its rope parameters")
    theta = number_in(settings if settings.get("rope_theta") else config, "rope_theta", 10_000.0)
    fraction = number_in(settings if settings.get("partial_rotary_factor") else config, "partial_rotary_factor", 1.0)
    dims = head_dim if scaling == "proportional" and fraction <= 1.0 else int(head_dim * min(fraction, 2.0))
    if not 0 < dims <= head_dim or dims % 2:
        raise UnsupportedModel(f"the model's config rotates {dims} of {head_dim} dimensions; they must be pairs")
    if scaling == "longrope":
        _check_factors(settings, dims // 2)
    return RopeConfig(
        dims=dims,
        theta=theta,
        scaling=scaling,
        settings={} if scaling == "default" else settings,
        trained_tokens=int(config.get("max_position_embeddings") or 0),
        sections=tuple(settings.get("mrope_section") or config.get("mrope_section") or ()),
    )


def read_layer_rope(config: Mapping[str, Any], head_dim: int, layer_type: str, theta: float) -> RopeConfig:
    """The rotation of one type of layers, in configs where types rotate differently: `rope_parameters` has an object
    for each type. In the older spelling `rope_scaling` is that of full attention. `theta`: if the object has none."""
    by_type = rope_settings({"rope_parameters": config.get("rope_parameters")})
    scaling = rope_settings({"rope_scaling": config.get("rope_scaling")}) if layer_type == "full_attention" else {}
    return read_rope(config, head_dim, {"rope_theta": theta, **(by_type.get(layer_type) or {}), **scaling})


def _check_factors(settings: Mapping[str, Any], count: int) -> None:
    for name in ("short_factor", "long_factor"):
        factors, needed = settings.get(name), f"{count} positive values in {name!r}"
        if not isinstance(factors, Sequence) or len(factors) != count or not all(map(is_positive, factors)):
            raise UnsupportedModel(f"rope scaling 'longrope' needs {needed}: {factors!r:.80}")


_MAX_EXPERTS = 1 << 12
"""Far above every published model; bounds what a damaged config can make a node compute."""


def routed(hidden: int, inner: int, experts: int, top_k: int, renormalise: bool, **options: Any) -> MoEConfig:
    """Raises UnsupportedModel for values that contradict each other."""
    if not 0 < experts <= _MAX_EXPERTS:
        raise UnsupportedModel(f"the model's config has {experts} experts; at most {_MAX_EXPERTS} are supported")
    if top_k > experts:
        raise UnsupportedModel(f"the model's config asks for {top_k} of {experts} experts; is it complete?")
    return MoEConfig(hidden, inner, experts, top_k, renormalise, **options)
