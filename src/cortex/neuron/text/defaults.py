"""The sampling options that a model's authors recommend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from cortex.wire.node.load_options import SamplingDefaults

_GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def from_generation_config(config: Mapping[str, Any]) -> SamplingDefaults:
    """The options in `generation_config.json`. `do_sample: false` is greedy, whatever the other options are."""
    values = {name: config.get(name) for name in _GGUF_KEYS}
    if config.get("do_sample") is False:
        values["temperature"] = 0.0
    return _valid(values)


def from_gguf(metadata: Mapping[str, Any]) -> SamplingDefaults:
    return _valid({name: metadata.get(key) for name, key in _GGUF_KEYS.items()})


def _valid(values: Mapping[str, object]) -> SamplingDefaults:
    """The values that have the right type and range; a wrong one must not make the model useless."""
    found = SamplingDefaults()
    for name, value in values.items():
        try:
            found = msgspec.convert({name: value}, SamplingDefaults).over(found)
        except msgspec.ValidationError:
            continue
    return found
