"""Every family with every kind of rope scaling: the frequencies of the reference library, or an error that names it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cortex.neuron.layers.configs import KV_MIXERS, RopeConfig
from cortex.neuron.layers.rope import inverse_frequencies
from cortex.neuron.models.config import UnsupportedModel
from cortex.neuron.models.registry import read_architecture

from .family_models import TABLE
from .tiny_family import SIZES

TRAINED = 32
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": TRAINED},
    "llama3": {
        **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": TRAINED,
    },
    "longrope": {"factor": 4.0, "original_max_position_embeddings": TRAINED},
    "telepathy": {},
}
REJECTED = ("dynamic", "telepathy")
"""The frequencies of `dynamic` depend on the length of a sequence, which pages of other sequences do not have."""


def ropes_of(config: dict[str, Any]) -> set[RopeConfig]:
    mixers = (layer.mixer for layer in read_architecture(config).layers)
    return {mixer.rope for mixer in mixers if isinstance(mixer, KV_MIXERS) and mixer.rope is not None}


def plain_ropes() -> dict[str, tuple[dict[str, Any], int]]:
    """The families whose layers all rotate alike, with the config of one of their models and its rotated dimensions."""
    found = {}
    for family, entry in TABLE.items():
        if entry.tower is not None or family == "phi3":  # Phi-3 takes any kind for longrope
            continue
        config = entry.config_of(next(iter(entry.changes))).to_dict()
        ropes = ropes_of(config)
        given = config.get("rope_parameters") or {}
        if len(ropes) == 1 and "rope_theta" in given:
            found[family] = config, next(iter(ropes)).dims
    return found


PLAIN = plain_ropes()


def test_most_families_rotate_all_layers_alike() -> None:
    assert len(PLAIN) >= 20


@pytest.mark.parametrize("family", PLAIN)
def test_scaling_of_every_kind_has_the_frequencies_of_the_reference_library(family: str) -> None:
    config, dims = PLAIN[family]
    for kind, settings in KINDS.items():
        given = {**config["rope_parameters"], "rope_type": kind, **settings}
        if kind == "longrope":
            given |= {"short_factor": [1.0 + 0.1 * pair for pair in range(dims // 2)]}
            given |= {"long_factor": [1.5 + pair for pair in range(dims // 2)]}
        changed = {**config, "rope_parameters": given, "max_position_embeddings": SIZES["max_position_embeddings"]}
        if kind in REJECTED:
            with pytest.raises(UnsupportedModel, match=kind):
                ropes_of(changed)
            continue
        (rope,) = ropes_of(changed)
        frequencies, scale = inverse_frequencies(rope, num_positions=64)
        theirs = TABLE[family].config(**(changed | {"original_max_position_embeddings": TRAINED}))
        reference, reference_scale = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"), seq_len=64)
        torch.testing.assert_close(frequencies, reference[: len(frequencies)], rtol=1e-5, atol=0, msg=kind)
        assert scale == pytest.approx(reference_scale), kind
