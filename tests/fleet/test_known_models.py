"""Names of common models, as people type them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.fleet.known_models import KNOWN_MODELS, AmbiguousName, known_model, known_repository, nearest_names
from cortex.neuron.models.registry import read_architecture
from cortex.neuron.models.sizes import WeightStorage, weight_bytes
from cortex.neuron.weights.hub.source import is_hub_id
from cortex.wire.errors import ModelNotFound

PUBLISHED = Path(__file__).parents[1] / "neuron" / "models" / "published_configs.jsonl"


@pytest.mark.parametrize(
    ("typed", "repository"),
    [
        ("gpt-oss-20b", "openai/gpt-oss-20b"),
        ("gpt-oss:20b", "openai/gpt-oss-20b"),
        ("gpt-oss", "openai/gpt-oss-20b"),
        ("gemma-4-26b", "google/gemma-4-26B-A4B-it"),
        ("gemma4:26b", "google/gemma-4-26B-A4B-it"),
        ("Gemma-4-31B-it", "google/gemma-4-31B-it"),
        ("qwen2.5-coder-7b", "Qwen/Qwen2.5-Coder-7B-Instruct"),
        ("qwen2.5-coder:7b", "Qwen/Qwen2.5-Coder-7B-Instruct"),
        ("Qwen2.5-Coder-7B-Instruct", "Qwen/Qwen2.5-Coder-7B-Instruct"),
        ("qwen3:latest", "Qwen/Qwen3-8B"),
        ("qwen3.6-35b", "Qwen/Qwen3.6-35B-A3B"),
        ("mistral-small", "mistralai/Mistral-Small-3.2-24B-Instruct-2506"),
        ("glm-4.7-flash", "zai-org/GLM-4.7-Flash"),
        ("llama3.2:1b", "meta-llama/Llama-3.2-1B-Instruct"),
        ("phi4", "microsoft/phi-4"),
        ("qwen3-vl:2b", "Qwen/Qwen3-VL-2B-Instruct"),
        ("devstral-small-2", "mistralai/Devstral-Small-2-24B-Instruct-2512"),
        ("minimax-m2", "MiniMaxAI/MiniMax-M2"),
        ("muse-glimmer:30b", "meta-models/Muse-Glimmer-30B"),
        ("muse-glimmer", "meta-models/Muse-Glimmer-30B"),
        ("mellum", "JetBrains/Mellum2.1-12B-A2.5B-Thinking"),
        ("mellum2.1-12b", "JetBrains/Mellum2.1-12B-A2.5B-Thinking"),
        ("mellum2", "JetBrains/Mellum2-12B-A2.5B-Instruct"),
    ],
)
def test_short_names_stand_for_a_repository(typed: str, repository: str) -> None:
    model = known_model(typed)
    assert model is not None
    assert model.repository == repository


def test_every_model_is_found_by_its_names_and_has_valid_repositories() -> None:
    assert len({model.name for model in KNOWN_MODELS}) == len(KNOWN_MODELS)
    for model in KNOWN_MODELS:
        assert all(known_model(name) is model for name in (model.name, model.repository, *model.aliases))
        assert is_hub_id(model.repository)
        assert model.gguf is None or is_hub_id(model.gguf)


def test_names_of_several_models_and_misspelled_ones_give_the_nearest() -> None:
    with pytest.raises(AmbiguousName) as several:
        known_model("granite-4.0")
    names = ("granite-4.0-micro", "granite-4.0-h-micro", "granite-4.0-h-tiny", "granite-4.0-h-small")
    assert several.value.names == names
    assert known_model("gpt-os-20b") is None
    assert nearest_names("gpt-os-20b")[0] == "gpt-oss-20b"


def test_sizes_are_those_of_the_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    shapes = __import__("shapes").SHAPES
    sys.modules.pop("shapes")
    compared = 0
    for name, config in shapes.items():
        model = known_model({"mistral-small-24b": "mistral-small"}.get(name, name)) if name != "tiny" else None
        if model is not None and name != "qwen3-next":  # of which the shape has half of the layers
            weights = weight_bytes(read_architecture(config), WeightStorage(2)) / 2e9
            # Published models also have vision towers and layers for prediction.
            assert 0.95 < model.billions / weights < 1.06, name
            compared += 1
    for line in PUBLISHED.read_text().splitlines():
        row = json.loads(line)
        if (model := known_model(row["name"])) is not None:
            assert 0.97 < model.billions / row["billions"] < 1.04, row["name"]
            compared += 1
    assert compared >= 35


def test_catalogue_understands_names_of_known_models_that_are_there() -> None:
    offered = Catalogue(models=(ModelSpec(id="openai/gpt-oss-20b"), ModelSpec(id="gemma-4-26b-a4b")))
    assert offered.resolve("gpt-oss:20b").model_id == "openai/gpt-oss-20b"
    assert offered.resolve("google/gemma-4-26B-A4B-it").model_id == "gemma-4-26b-a4b"
    assert Catalogue().resolve("phi4", live=["microsoft/phi-4"]).model_id == "microsoft/phi-4"
    with pytest.raises(ModelNotFound):
        offered.resolve("qwen3-8b")


def test_gated_models_come_from_a_repository_that_needs_no_account() -> None:
    assert known_repository("llama3.2:1b") == "unsloth/Llama-3.2-1B-Instruct"
    assert known_repository("gemma3:4b") == "unsloth/gemma-3-4b-it"
    assert known_repository("qwen3:8b") == "Qwen/Qwen3-8B"
    assert not [model for model in KNOWN_MODELS if model.open_repository.startswith(("meta-llama/", "google/gemma-3-"))]
