"""The sampling options that a model's authors recommend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from cortex.wire.node.protocol import SamplingDefaults


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """From the model's own files; None for what they leave out."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None


def from_generation_config(config: Mapping[str, Any]) -> GenerationDefaults:
    """From `generation_config.json`. `do_sample: false` is greedy, whatever the other options are."""
    temperature = 0.0 if config.get("do_sample") is False else _number(config.get("temperature"))
    return GenerationDefaults(
        temperature=temperature,
        top_k=_integer(config.get("top_k")),
        top_p=_number(config.get("top_p")),
        min_p=_number(config.get("min_p")),
        repetition_penalty=_number(config.get("repetition_penalty")),
        max_tokens=_integer(config.get("max_new_tokens")),
    )


def from_gguf(metadata: Mapping[str, Any]) -> GenerationDefaults:
    return GenerationDefaults(
        temperature=_number(metadata.get("general.sampling.temp")),
        top_k=_integer(metadata.get("general.sampling.top_k")),
        top_p=_number(metadata.get("general.sampling.top_p")),
        min_p=_number(metadata.get("general.sampling.min_p")),
        repetition_penalty=_number(metadata.get("general.sampling.penalty_repeat")),
    )


def overridden(own: GenerationDefaults, operator: SamplingDefaults) -> GenerationDefaults:
    """The operator's values, and the model's own where there are none."""
    return replace(
        own, **{name: value for name, value in msgspec.structs.asdict(operator).items() if value is not None}
    )


def as_sampling(own: GenerationDefaults) -> SamplingDefaults:
    """The model's own values as the node reports them. Values outside their ranges are left out: requests get the
    error."""
    fields = {name: getattr(own, name) for name in SamplingDefaults.__struct_fields__}
    try:
        return msgspec.convert({name: value for name, value in fields.items() if value is not None}, SamplingDefaults)
    except msgspec.ValidationError:
        return SamplingDefaults()


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
