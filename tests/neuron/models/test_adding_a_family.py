"""A family is an architecture and a descriptor: the walk-through's own code, against the reference library."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.memory.plan import ModelSizes
from cortex.neuron.engine.request import LoadSpec
from cortex.neuron.families.family import ModelFamily
from cortex.neuron.families.registry import BY_TYPE
from cortex.neuron.models import registry
from cortex.neuron.models.sizes import WeightStorage

from ..engine_runs import responses
from .driver import continued
from .reference_models import randomised

WALK_THROUGH = Path(__file__).parents[3] / "docs" / "adding-a-model.md"
EAGER: dict[str, Any] = {"attn_implementation": "eager"}
PROMPT = (5, 90, 3, 17, 44, 2, 61, 8, 33, 70) * 5


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds the two files of the walk-through."""
    architecture, descriptor = re.findall(r"```python\n(.*?)```", WALK_THROUGH.read_text(), flags=re.DOTALL)
    (tmp_path / "walk_through_architecture.py").write_text(architecture)
    (tmp_path / "walk_through_descriptor.py").write_text(descriptor)
    monkeypatch.syspath_prepend(tmp_path)
    for model_type, read in importlib.import_module("walk_through_architecture").ARCHITECTURES.items():
        monkeypatch.setitem(registry.FAMILIES, model_type, read)
    for family in importlib.import_module("walk_through_descriptor").FAMILIES:
        for model_type in family.model_types:
            monkeypatch.setitem(cast("dict[str, ModelFamily]", BY_TYPE), model_type, family)


@pytest.mark.usefixtures("added")
@pytest.mark.parametrize("types", [None, ["sliding_attention", "full_attention", "full_attention"]])
def test_family_of_the_walk_through_matches_the_reference_library(types: list[str] | None, tmp_path: Path) -> None:
    config = transformers.CwmConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=72,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        sliding_window=7,
        layer_types=types,
        **EAGER,
    )
    reference = randomised(lambda: transformers.CwmForCausalLM(config), std=0.15, vector_std=0.5)
    reference.save_pretrained(tmp_path / "model")
    spec = LoadSpec(str(tmp_path / "model"), dtype="float32", max_num_seqs=2, prefill_chunk_tokens=20)
    sizes = ModelSizes.of(registry.read_architecture(config.to_dict()), WeightStorage(item_bytes=4))
    engine = Engine.load(spec, torch.device("cpu"), lambda *_: None, lambda: False)
    assert sizes.weight_bytes + sizes.table_bytes == engine.info.weight_bytes
    with torch.inference_mode():
        assert responses(engine, [PROMPT], 12) == [continued(reference, PROMPT, 12)]
    engine.close()


def test_library_runs_a_family_that_is_not_registered() -> None:
    assert registry.read_architecture({"model_type": "cwm"}).backend == "transformers"
