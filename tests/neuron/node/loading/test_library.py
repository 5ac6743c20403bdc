from pathlib import Path

import pytest

from cortex.neuron.config import DefaultModel, HarnessSettings, ModelEntry, NeuronConfig, TorchHarness
from cortex.neuron.node.loading.library import Library, cache_directory, scan_cache
from cortex.wire.errors import ModelNotFound
from cortex.wire.node import LoadRequest


@pytest.mark.parametrize(
    ("hf_cache", "env", "expected"),
    [
        ("/mine", {"HF_HUB_CACHE": "/cache", "HF_HOME": "/home"}, "/mine"),
        (None, {"HF_HUB_CACHE": "/cache", "HF_HOME": "/home"}, "/cache"),
        (None, {"HF_HOME": "/home"}, "/home/hub"),
        (None, {}, str(Path("~/.cache/huggingface/hub").expanduser())),
    ],
)
def test_cache_directory_prefers_the_config_then_the_environment(hf_cache, env, expected):
    torch = TorchHarness(hf_cache=Path(hf_cache) if hf_cache else None)
    assert cache_directory(NeuronConfig(harness=HarnessSettings(torch=torch)), env) == Path(expected)


def test_lists_only_cached_models_with_weights(tmp_path):
    for name, file in {
        "models--org--whole": "model.safetensors",
        "models--org--quantised": "q4.gguf",
        "models--org--tokenizer-only": "tokenizer.json",
        "datasets--org--data": "model.safetensors",
        "models--org--no\udcfftext": "model.safetensors",
        "models--alone": "model.safetensors",
        "models--org--..": "model.safetensors",
    }.items():
        folder = tmp_path / name / "snapshots" / "abc"
        folder.mkdir(parents=True)
        (folder / file).touch()
    assert scan_cache(tmp_path) == ["org/quantised", "org/whole"]
    assert scan_cache(tmp_path / "absent") == []


CONFIG = NeuronConfig(
    models=(ModelEntry(id="a", source="/models/a", quant="q8_0", memory_mb=100),),
    default_models=(DefaultModel(model_id="b", source="org/b", devices=(1,)), DefaultModel(model_id="a")),
)


def test_default_model_inherits_from_its_configured_entry():
    library = Library(CONFIG, {})
    assert {model.id for model in library} == {"a", "b"}
    assert library.find("a").source == "/models/a"
    assert library.find("a").quant == "q8_0"
    assert library.find("b").devices == (1,)


def test_load_request_overrides_only_the_options_it_has():
    library = Library(CONFIG, {})
    adopted = library.adopt(LoadRequest(model_id="b", context_tokens=1000))
    assert (adopted.source, adopted.devices, adopted.context_tokens) == ("org/b", (1,), 1000)
    assert library.adopt(LoadRequest(model_id="org/new")).source == "org/new"
    assert library.find("org/new")


@pytest.mark.parametrize("model_id", ["nonsense", "../../etc/passwd", "a/../b", "x" * 500])
def test_rejects_ids_that_cannot_name_a_model(model_id):
    with pytest.raises(ModelNotFound):
        Library(CONFIG, {}).adopt(LoadRequest(model_id=model_id))
