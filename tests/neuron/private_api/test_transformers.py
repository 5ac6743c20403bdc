"""What is used of the transformers library without a promise: models are found and filled without it too."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from cortex.neuron.models.config import UnsupportedModel
from cortex.neuron.models.registry import read_architecture
from cortex.neuron.models.transformers import library
from cortex.neuron.models.transformers.library import library_model
from cortex.neuron.models.transformers.network import Network
from cortex.neuron.private_api import transformers as private

from ..failed_probes import REASON, fail_probe
from ..models.transformers_models import reference_of

NAMES = ("model.layers.10.mlp.up.weight", "model.layers.2.mlp.up.weight", "model.norm.weight", "head.weight")


@pytest.fixture
def fresh() -> Iterator[None]:
    for function in (library.library_model, private.model_classes):
        function.cache_clear()
    yield
    for function in (library.library_model, private.model_classes):
        function.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_import_says_the_same_as_the_source_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What another process would do is done in this one, which has imported the library already."""

    def run(command: list[str], **_: object) -> SimpleNamespace:
        assert command == [sys.executable, "-m", private.__name__, "mixtral"]
        private.main(command[-1])
        return SimpleNamespace(stdout=capsys.readouterr().out)

    parsed = library_model("mixtral")
    library_model.cache_clear()
    private.model_classes.cache_clear()
    fail_probe(monkeypatch, private.SOURCE_FILES)
    monkeypatch.setattr(subprocess, "run", run)
    imported = library_model("mixtral")
    for name in ("class_name", "aliases", "tp_plan", "base_prefix", "tied", "unread", "has_transposed_linears"):
        assert getattr(imported, name) == getattr(parsed, name), name
    assert parsed.options <= imported.options
    assert dict(imported.defaults) == dict(imported.defaults) | dict(parsed.defaults)


@pytest.mark.usefixtures("fresh")
def test_library_that_cannot_be_imported_either_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_probe(monkeypatch, private.SOURCE_FILES)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(UnsupportedModel, match="cannot be used: it cannot be imported"):
        library_model("mixtral")


def test_tensors_belong_to_parameters_of_their_name_without_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_probe(monkeypatch, private.CONVERSIONS)
    model = SimpleNamespace(base_model_prefix="model")
    targets = dict.fromkeys((*NAMES[:2], "norm.weight", "model.head.weight"))
    found = {name: place.target for name, place in private.renamed(model, NAMES, targets)}
    assert found == {
        "head.weight": "model.head.weight",
        NAMES[1]: NAMES[1],
        NAMES[0]: NAMES[0],
        "model.norm.weight": "norm.weight",
    }
    assert list(found) == ["head.weight", NAMES[1], NAMES[0], "model.norm.weight"]


def test_names_are_those_of_the_table_for_checkpoints_of_this_version(monkeypatch: pytest.MonkeyPatch) -> None:
    model = reference_of("gpt_neox", "wide")
    targets = model.state_dict()
    by_table = dict(private.renamed(model, targets, targets))
    fail_probe(monkeypatch, private.CONVERSIONS)
    assert dict(private.renamed(model, targets, targets)) == by_table


def test_table_that_fails_when_it_is_used_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(*_: object) -> None:
        raise TypeError("get_model_conversion_mapping() takes other arguments")

    for name, value in {"_is_probed": False, "_problem": None}.items():
        monkeypatch.setattr(private.CONVERSIONS, name, value)
    monkeypatch.setattr(private, "_by_table", changed)
    model = SimpleNamespace(base_model_prefix="model")
    assert dict(private.renamed(model, ["a"], {"model.a": None})) == {"a": private.Renamed("model.a")}
    assert "takes other arguments" in str(private.CONVERSIONS.problem)


def test_attention_is_traced_also_where_experts_cannot_be_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    config = reference_of("gpt_neox", "wide").config.to_dict()
    expected = Network.of(read_architecture(config))  # type: ignore[arg-type]
    fail_probe(monkeypatch, private.EXPERTS)
    found = Network.of(read_architecture(config))  # type: ignore[arg-type]
    assert [call.config for call in found.calls] == [call.config for call in expected.calls]
    assert private.EXPERTS.problem == REASON
