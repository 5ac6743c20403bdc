from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cortex.neuron.config import DefaultModel, HarnessSettings, ModelEntry, NeuronConfig, TorchHarness
from cortex.neuron.node.library import MAX_ADOPTED, Library, cache_directory, scan_cache
from cortex.neuron.weights.hub.cache import RepositoryCache
from cortex.wire.errors import LoadFailed, ModelNotFound, ModelUnsupported
from cortex.wire.node.load_options import SamplingDefaults
from cortex.wire.node.neighbours import Neighbour, repository_of
from cortex.wire.node.orders import LoadRequest


@pytest.mark.parametrize(
    ("hf_cache", "env", "expected"),
    [
        ("/mine", {"HF_HUB_CACHE": "/cache", "HF_HOME": "/home"}, "/mine"),
        (None, {"HF_HUB_CACHE": "/cache", "HF_HOME": "/home"}, "/cache"),
        (None, {"HF_HOME": "/home"}, "/home/hub"),
        (None, {}, str(Path("~/.cache/huggingface/hub").expanduser())),
    ],
)
def test_cache_directory_prefers_the_config_then_the_environment(
    hf_cache: str | None, env: dict[str, Any], expected: str
) -> None:
    torch = TorchHarness(hf_cache=Path(hf_cache) if hf_cache else None)
    assert cache_directory(NeuronConfig(harness=HarnessSettings(torch=torch)), env) == Path(expected)


def test_lists_only_cached_models_with_weights(tmp_path: Path) -> None:
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
    assert scan_cache(tmp_path) == {"org/quantised": "org/quantised", "org/whole": "org/whole"}
    assert scan_cache(tmp_path / "absent") == {}


@pytest.mark.parametrize("name", ["theirs", None, "\0"])
def test_copy_of_another_nodes_path_has_the_name_of_its_model(tmp_path: Path, name: str | None) -> None:
    source = repository_of("/models/theirs")
    assert source is not None
    folder = RepositoryCache(tmp_path, source).root
    (folder / "snapshots" / "main").mkdir(parents=True)
    (folder / "snapshots" / "main" / "model.safetensors").write_bytes(b"")
    if name is not None:
        (folder / "model_id").write_text(name)
    assert scan_cache(tmp_path) == ({"theirs": source} if name == "theirs" else {})


def test_files_in_the_home_directory_are_not_copied_from_another_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    library = Library(NeuronConfig(model_roots=(tmp_path,)), {})
    request = LoadRequest(model_id="m", source="~/m", neighbours=(Neighbour(name="a", url="http://a"),))
    (tmp_path / "m").mkdir()
    assert library.adopt(request).source == "~/m"
    assert library.keep_options(request).source == "~/m"


CONFIG = NeuronConfig(
    models=(ModelEntry(id="a", source="/models/a", quant="q8_0", memory_mb=100, control_tokens_in_messages=True),),
    default_models=(DefaultModel(id="b", source="org/b", devices=(1,)), DefaultModel(id="a")),
)


def test_default_model_inherits_from_its_configured_entry() -> None:
    library = Library(CONFIG, {})
    assert {model.id for model in library} == {"a", "b"}
    assert library.find("a").source == "/models/a"
    assert library.find("a").quant == "q8_0"
    assert library.find("a").control_tokens_in_messages
    assert library.find("b").devices == (1,)


EVERY_OPTION: dict[str, Any] = {
    "source": "org/a",
    "harness": "vllm",
    "quant": "q8_0",
    "context_tokens": 4096,
    "kv_dtype": "fp8",
    "deterministic": True,
    "speculation": "off",
    "host_weights": 4096,
    "vision": "cpu",
    "memory_mb": 100,
    "tensor_parallel": 2,
    "devices": (1, 2, 3, 4),
    "replicas": 2,
    "control_tokens_in_messages": True,
    "chat_template": "{{ messages }}",
    "sampling": SamplingDefaults(top_k=5),
}
INSTEAD: dict[str, Any] = {
    "pipeline_parallel": 2,
    "max_replicas": 3,
}
"""Those that cannot be combined with the others."""


def test_a_draft_model_may_be_named_alone() -> None:
    entries = (ModelEntry(id="a", draft="org/small"), ModelEntry(id="b", speculation="draft:org/small"))
    a, b = Library(NeuronConfig(models=entries), {})
    assert a.speculation == b.speculation == "draft:org/small"
    wrong: tuple[dict[str, Any], ...] = (
        {"draft": "x", "speculation": "mtp"},
        {"speculation": "lookups"},
        {"speculation": "draft:"},
    )
    for given in wrong:
        with pytest.raises(ValueError, match="speculation is"):
            ModelEntry(id="a", **given)


@pytest.mark.parametrize("given", [EVERY_OPTION, *({name: value} for name, value in INSTEAD.items())])
def test_default_model_inherits_every_option_that_it_does_not_give(given: dict[str, Any]) -> None:
    assert {*EVERY_OPTION, *INSTEAD, "id", "draft"} == set(ModelEntry.__struct_fields__)
    known = {
        Library(NeuronConfig(models=models, default_models=defaults), {}).find("a")
        for models, defaults in (
            ((ModelEntry(id="a", **given),), ()),
            ((ModelEntry(id="a", **given),), (DefaultModel(id="a"),)),
            ((), (DefaultModel(id="a", **given),)),
        )
    }
    (model,) = known
    expected = {**given, "memory_bytes": given["memory_mb"] << 20} if "memory_mb" in given else given
    assert all(getattr(model, name) == value for name, value in expected.items() if name != "memory_mb")


def test_what_a_default_model_gives_is_preferred_to_its_entry() -> None:
    entry = ModelEntry(id="a", source="org/a", replicas=4, memory_mb=100, kv_dtype="fp8", harness="vllm")
    default = DefaultModel(id="a", source="org/b", replicas=2, memory_mb=200, kv_dtype="auto", harness="torch")
    model = Library(NeuronConfig(models=(entry,), default_models=(default,)), {}).find("a")
    assert (model.source, model.replicas, model.memory_bytes) == ("org/b", 2, 200 << 20)
    assert (model.kv_dtype, model.harness) == ("auto", "torch")


def test_load_request_overrides_only_the_options_it_has() -> None:
    library = Library(CONFIG, {})
    adopted = library.adopt(LoadRequest(model_id="b", context_tokens=1000))
    assert (adopted.source, adopted.devices, adopted.context_tokens) == ("org/b", (1,), 1000)
    assert library.adopt(LoadRequest(model_id="org/new")).source == "org/new"
    assert library.find("org/new")
    assert not adopted.control_tokens_in_messages
    opted_out = library.adopt(LoadRequest(model_id="b", control_tokens_in_messages=True))
    assert opted_out.control_tokens_in_messages


def test_source_may_be_the_name_of_a_model_that_the_node_knows() -> None:
    library = Library(CONFIG, {})
    request = LoadRequest(model_id="like-a", source="a", context_tokens=64)
    assert (library.adopt(request).source, library.adopt(request).quant) == ("/models/a", "q8_0")
    kept = library.keep_options(request)
    assert (kept.source, kept.context_tokens) == ("/models/a", 64)
    assert library.adopt(LoadRequest(model_id="like-a", source="a", quant="q4_k")).quant == "q4_k"
    assert library.adopt(LoadRequest(model_id="a", source="a")).source == "/models/a"


def test_kept_options_are_those_of_the_latest_request_alone(tmp_path: Path) -> None:
    library = Library(NeuronConfig(model_roots=(tmp_path,)), {})
    plain = LoadRequest(model_id="m", source=str(tmp_path / "m"))
    given = replace(plain, context_tokens=64, deterministic=True, quant="q4", tensor_parallel=2, devices=(0, 1))
    bare = library.adopt(plain)
    library.adopt(given)
    kept = library.keep_options(given)
    assert (kept.context_tokens, kept.quant, kept.tensor_parallel, kept.devices) == (64, "q4", 2, ())
    assert library.find("m") == kept == library.keep_options(given)
    assert library.keep_options(plain) == bare == library.adopt(plain)


def test_models_in_the_hub_cache_take_options_and_configured_ones_do_not() -> None:
    library = Library(CONFIG, {})
    library.discovered({"org/found": "org/found"})
    given = LoadRequest(model_id="org/found", kv_dtype="fp8")
    assert library.takes_options(library.adopt(given))
    assert (library.keep_options(given).kv_dtype, library.find("org/found").kv_dtype) == ("fp8", "fp8")
    assert not library.takes_options(library.adopt(replace(given, source="org/other")))
    assert not library.takes_options(library.adopt(LoadRequest(model_id="b", kv_dtype="fp8")))


def test_quantisation_that_was_pulled_from_the_hub_is_kept() -> None:
    library = Library(CONFIG, {})
    library.adopt(LoadRequest(model_id="org/new"))
    library.remember_quant("org/new", "q4")
    assert library.keep_options(LoadRequest(model_id="org/new")).quant == "q4"


@pytest.mark.parametrize(
    ("source", "quant", "wanted"),
    [("org/m:q4", None, "q4"), ("org/m@main:Q8_0", None, "Q8_0"), ("org/m:F16", "q4", "q4"), ("org/m", None, None)],
)
def test_quantisation_in_the_source_is_that_of_the_model(source: str, quant: str | None, wanted: str | None) -> None:
    library = Library(NeuronConfig(models=(ModelEntry(id="m", source=source, quant=quant),)), {})
    assert library.find("m").quant == wanted
    assert library.adopt(LoadRequest(model_id="m")).quant == wanted
    assert library.adopt(LoadRequest(model_id="new", source=source, quant=quant)).quant == wanted


@pytest.mark.parametrize("model_id", ["nonsense", "a/../b", "x" * 500])
def test_rejects_ids_that_cannot_name_a_model(model_id: str) -> None:
    with pytest.raises(ModelNotFound):
        Library(CONFIG, {}).adopt(LoadRequest(model_id=model_id))


def test_request_for_devices_that_the_entry_does_not_permit_is_rejected() -> None:
    entries = (ModelEntry(id="m", source="/m", tensor_parallel=2, devices=(2, 3, 4)), ModelEntry(id="n", source="/n"))
    library = Library(NeuronConfig(models=entries), {})
    assert library.adopt(LoadRequest(model_id="m")).devices == (2, 3, 4)
    assert library.adopt(LoadRequest(model_id="m", devices=(2, 4))).devices == (2, 4)
    assert library.adopt(LoadRequest(model_id="n", devices=(0, 1), tensor_parallel=2)).devices == (0, 1)
    with pytest.raises(ModelUnsupported, match=r"may not use device 0 of this node, only 2, 3, 4: name those"):
        library.adopt(LoadRequest(model_id="m", devices=(0, 2)))
    with pytest.raises(ModelUnsupported, match=r"takes 2 devices of this node .* names 1: name more, or none"):
        library.adopt(LoadRequest(model_id="m", devices=(2,)))


def test_devices_of_a_request_replace_the_division_of_an_earlier_one() -> None:
    library = Library(NeuronConfig(), {})
    library.adopt(LoadRequest(model_id="org/m"))
    library.keep_options(LoadRequest(model_id="org/m", tensor_parallel=2))
    assert library.adopt(LoadRequest(model_id="org/m")).tensor_parallel == 2
    placed = library.adopt(LoadRequest(model_id="org/m", devices=(1,)))
    assert (placed.tensor_parallel, placed.devices) == (1, (1,))


@pytest.mark.parametrize(
    ("configured", "requested", "expected"),
    [
        ({}, {"pipeline_parallel": 2}, (1, 2)),
        ({"pipeline_parallel": 2}, {}, (1, 2)),
        ({"pipeline_parallel": 2}, {"tensor_parallel": 2}, (1, 2)),  # of a gateway that knows the number of devices
        ({"tensor_parallel": 2}, {"pipeline_parallel": 2}, (1, 2)),
        ({"tensor_parallel": 2}, {}, (2, 1)),
        ({"pipeline_parallel": 2, "replicas": 2}, {"tensor_parallel": 4}, (1, 2)),
    ],
)
def test_stages_of_either_program_are_preferred_to_shares(
    configured: dict[str, Any], requested: dict[str, Any], expected: tuple[int, int]
) -> None:
    library = Library(NeuronConfig(models=(ModelEntry(id="m", source="/m", **configured),)), {})
    adopted = library.adopt(LoadRequest(model_id="m", **requested))
    assert (adopted.tensor_parallel, adopted.pipeline_parallel) == expected


def test_load_request_for_stages_and_shares_is_rejected() -> None:
    with pytest.raises(ValueError, match="`m` has tensor_parallel and pipeline_parallel"):
        LoadRequest(model_id="m", tensor_parallel=2, pipeline_parallel=2)


@pytest.fixture
def rooted(tmp_path: Path) -> Library:
    """A library with a cache, a model root and a configured model, next to a secret and a link to it."""
    for name in ("cache", "root", "own", "secret"):
        (tmp_path / name / "model").mkdir(parents=True)
    (tmp_path / "root" / "link").symlink_to(tmp_path / "secret")
    config = NeuronConfig(
        harness=HarnessSettings(torch=TorchHarness(hf_cache=tmp_path / "cache")),
        model_roots=(tmp_path / "root",),
        models=(ModelEntry(id="own", source=str(tmp_path / "own" / "model")),),
    )
    return Library(config, {})


@pytest.mark.parametrize("path", ["./model", "../own/model", "model"])
def test_relative_paths_are_models_if_they_begin_as_one(
    rooted: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path / "own")
    if path.startswith("."):
        assert rooted.adopt(LoadRequest(model_id=path)).source == path
    else:
        with pytest.raises(ModelNotFound):
            rooted.adopt(LoadRequest(model_id=path))


@pytest.mark.parametrize("path", ["cache/model", "root/model", "root/model/../model", "own/model", "root"])
def test_load_requests_may_name_paths_in_the_model_roots(rooted: Library, tmp_path: Path, path: str) -> None:
    path = str(tmp_path / path)
    assert rooted.adopt(LoadRequest(model_id="new", source=path)).source == path
    assert rooted.adopt(LoadRequest(model_id=path)).source == path


@pytest.mark.parametrize(
    "path", ["secret/model", "root/link/model", "root/../secret/model", "secret/absent", "own", "rootless"]
)
def test_load_requests_may_not_name_other_paths_whether_or_not_they_exist(
    rooted: Library, tmp_path: Path, path: str
) -> None:
    for model_id in ("new", "own"):
        with pytest.raises(LoadFailed, match="model_roots"):
            rooted.adopt(LoadRequest(model_id=model_id, source=str(tmp_path / path)))
    with pytest.raises(LoadFailed, match="model_roots"):
        rooted.adopt(LoadRequest(model_id=str(tmp_path / path)[:200]))
    assert {model.id for model in rooted} == {"own"}


def test_draft_models_of_load_requests_are_in_the_model_roots_too(rooted: Library, tmp_path: Path) -> None:
    for name in (str(tmp_path / "root" / "model"), "org/small", "own"):
        adopted = rooted.adopt(LoadRequest(model_id="own", speculation=f"draft:{name}"))
        assert adopted.speculation == f"draft:{name}"
    for path in ("secret/model", "root/link/model", "secret/absent"):
        for model_id in ("own", "org/new"):
            with pytest.raises(LoadFailed, match="model_roots"):
                rooted.adopt(LoadRequest(model_id=model_id, speculation=f"draft:{tmp_path / path}"))
            with pytest.raises(LoadFailed, match="model_roots"):
                rooted.adopt(LoadRequest(model_id=model_id, draft=f" {tmp_path / path}"))
    assert {model.id for model in rooted} == {"own"}


def test_load_request_may_repeat_the_draft_model_that_is_configured() -> None:
    library = Library(NeuronConfig(models=(ModelEntry(id="a", source="/a", draft="/elsewhere/small"),)), {})
    adopted = library.adopt(LoadRequest(model_id="a", draft="/elsewhere/small"))
    assert adopted.speculation == "draft:/elsewhere/small"


@pytest.mark.parametrize("source", ["/etc/pass\0wd", "~nobody-such/x", "./", "../x", "/" + "x" * 4000, "~"])
def test_rejects_paths_that_are_strange_or_relative(rooted: Library, source: str) -> None:
    with pytest.raises(LoadFailed, match="model_roots"):
        rooted.adopt(LoadRequest(model_id="new", source=source))
    with pytest.raises(LoadFailed, match="model_roots"):
        rooted.adopt(LoadRequest(model_id=source))


def test_number_of_ids_that_requests_add_is_bounded(rooted: Library) -> None:
    for number in range(MAX_ADOPTED):
        rooted.adopt(LoadRequest(model_id=f"org/m{number}"))
    with pytest.raises(LoadFailed, match="limit"):
        rooted.adopt(LoadRequest(model_id="org/one-more"))
    assert rooted.adopt(LoadRequest(model_id="org/m0")).source == "org/m0"


def test_sampling_of_a_request_comes_before_that_of_the_node_value_by_value() -> None:
    config = NeuronConfig(
        models=(ModelEntry(id="a", source="org/a", sampling=SamplingDefaults(temperature=0.7, top_k=20)),),
        default_models=(DefaultModel(id="a", sampling=SamplingDefaults(temperature=0.0)),),
    )
    library = Library(config, {})
    assert library.find("a").sampling == SamplingDefaults(temperature=0.0, top_k=20)
    adopted = library.adopt(LoadRequest(model_id="a", sampling=SamplingDefaults(top_p=0.9, top_k=0)))
    assert adopted.sampling == SamplingDefaults(temperature=0.0, top_p=0.9, top_k=0)
    assert library.find("a").sampling.top_p is None, "it holds for one load"
