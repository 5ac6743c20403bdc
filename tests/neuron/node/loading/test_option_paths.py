"""Every option of the schema, on its way from a configuration file over the wire to what a worker loads."""

from __future__ import annotations

import dataclasses
from inspect import get_annotations
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from msgspec import inspect

from cortex import settings
from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.neuron.config import ModelEntry, NeuronConfig
from cortex.neuron.engine.request import LoadSpec
from cortex.neuron.node.library import KnownModel, Library
from cortex.neuron.worker.protocol import Load
from cortex.settings import schema
from cortex.settings.reference import reference
from cortex.wire.node.groups import PrepareMember
from cortex.wire.node.load_options import FileOptions, LoadOptions, PlacedOptions
from cortex.wire.node.orders import FilesRequest, LoadRequest

SPEC_TYPES = get_type_hints(LoadSpec)


def fields_of(cls: type[msgspec.Struct]) -> dict[str, inspect.Field]:
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    return {field.name: field for field in info.fields}


SCHEMA = fields_of(LoadOptions)
ALIASES = {"draft"}
"""Another way of writing an option, which no other form has."""


def example(name: str) -> Any:
    """A value that is not the default."""
    chosen = {
        "source": "owner/model",
        "harness": "vllm",
        "speculation": "off",
        "sampling": {"temperature": 0.5},
        "host_weights": 4096,
    }
    if name in chosen:
        return chosen[name]
    (kind,) = schema.alternatives(SCHEMA[name].type)
    match kind:
        case inspect.LiteralType():
            return max(map(str, kind.values))  # "fp8", "off"
        case inspect.BoolType():
            return True
        case inspect.IntType():
            return (kind.ge or 0) + 2
        case inspect.VarTupleType():
            return ["a", "b"]
        case _:
            return "q8_0"


def node_model(config: NeuronConfig, request: LoadRequest) -> KnownModel:
    sent = msgspec.json.decode(msgspec.json.encode(request), type=LoadRequest)
    assert sent == request
    return Library(config, {}).adopt(sent)


def value_of(options: LoadOptions, name: str) -> Any:
    value = msgspec.to_builtins(getattr(options, name))
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


def worker_value(model: KnownModel, name: str) -> Any:
    """What a worker reads from its channel."""
    message = Load(1, LoadSpec(path="", **model.shared_with(LoadSpec)))
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Load)
    return getattr(received.spec, name)


@pytest.mark.parametrize("name", sorted(SCHEMA.keys() - ALIASES))
def test_option_of_the_catalogue_reaches_the_node_and_the_worker(tmp_path: Path, name: str) -> None:
    written = tmp_path / "models.toml"
    written.write_text(f'[[models]]\nid = "m/m"\n{name} = {schema.toml(example(name))}\n')
    spec = settings.load(Catalogue, written, env_prefix="CORTEX_", env={}).spec("m/m")
    model = node_model(NeuronConfig(), spec.load_request)
    given = example(name)
    assert value_of(model, name) in (given, tuple(given) if isinstance(given, list) else given)
    if name in SPEC_TYPES:
        assert worker_value(model, name) == given


@pytest.mark.parametrize("name", sorted(fields_of(PlacedOptions).keys() - ALIASES - {"nodes", "devices"}))
def test_option_of_a_node_reaches_the_worker_where_a_request_says_nothing(tmp_path: Path, name: str) -> None:
    written = tmp_path / "neuron.toml"
    written.write_text(f'[[models]]\nid = "m/m"\n{name} = {schema.toml(example(name))}\n')
    config = settings.load(NeuronConfig, written, env_prefix="NEURON_", env={})
    model = node_model(config, LoadRequest(model_id="m/m"))
    assert value_of(model, name) == example(name)
    if name in SPEC_TYPES:
        assert worker_value(model, name) == example(name)


@pytest.mark.parametrize("name", sorted(SCHEMA.keys() & SPEC_TYPES.keys()))
def test_engine_has_type_and_default_of_the_schema(name: str) -> None:
    (default,) = [field.default for field in dataclasses.fields(LoadSpec) if field.name == name]
    assert getattr(KnownModel(id="m", source="m"), name) == default
    for kind in schema.alternatives(SCHEMA[name].type):
        if isinstance(kind, inspect.LiteralType):
            parts = [each for part in get_args(SPEC_TYPES[name]) for each in get_args(part) or (part,)]
            assert {each for each in parts if isinstance(each, str)} == set(map(str, kind.values))


FORMS = (ModelSpec, ModelEntry, LoadRequest, KnownModel, FilesRequest, PrepareMember)
NEVER_ABSENT = {(KnownModel, "source"), (KnownModel, "harness"), (PrepareMember, "harness")}


@pytest.mark.parametrize("form", FORMS)
def test_form_declares_no_option_of_the_schema_again(form: type[msgspec.Struct]) -> None:
    assert issubclass(form, FileOptions)
    own = (cls for cls in form.__mro__ if cls.__module__ != FileOptions.__module__)
    declared = {name for cls in own for name in get_annotations(cls)}
    assert {(form, name) for name in declared & SCHEMA.keys()} <= NEVER_ABSENT


@pytest.mark.parametrize("form", [Catalogue, NeuronConfig])
def test_reference_page_has_a_line_for_every_option(form: type[msgspec.Struct]) -> None:
    starts = [line.split(" | ")[0] for line in reference(form).splitlines()]
    assert [name for name in SCHEMA if not {f"| `{name}`", f"## `[models.{name}]`"} & set(starts)] == []


def test_devices_are_not_for_catalogues() -> None:
    with pytest.raises(settings.SettingsError, match="unknown key"):
        settings.loads(Catalogue, '[[models]]\nid = "m"\ndevices = [0]\n')
