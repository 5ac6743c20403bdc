"""`cortex import`: what our programs read from the files that it writes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from copy import deepcopy
from datetime import date
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from cortex.cli.importing.llama_swap import NotLlamaSwap, convert
from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.gateway.config import Config
from cortex.neuron.config import NeuronConfig
from cortex.neuron.servers.entry import HarnessEntry
from cortex.settings import loads
from cortex.system.exits import ExitCode

from .examples import FULL, GROUPS, MATRIX

if TYPE_CHECKING:
    from ..conftest import Invoke


def read(text: str) -> tuple[Catalogue, NeuronConfig, Config, list[str]]:
    imported = convert(yaml.safe_load(text))
    files = imported.files
    return (
        loads(Catalogue, files["models.toml"]),
        loads(NeuronConfig, files["neuron.toml"]),
        loads(Config, files["cortex.toml"]),
        imported.notes,
    )


def specs(text: str) -> dict[str, ModelSpec]:
    return {spec.id: spec for spec in read(text)[0].models}


def harnesses(text: str) -> dict[str, HarnessEntry]:
    return {entry.name: entry for entry in read(text)[1].harnesses}


def test_command_has_its_macros_and_no_comments() -> None:
    large = harnesses(FULL)["large"]
    assert large.cmd == (
        *("/opt/llama/llama-server", "--port", "${PORT}", "--model", "${MODEL_PATH}", "--ctx-size", "16384"),
        *("--flash-attn", "true", "--temperature", "0.7", "--alias", "two words"),
    )
    assert large.env == {"KEY": "${env.SECRET}=x"}


def test_settings_of_a_model_stand_where_ours_are() -> None:
    catalogue, node, _, notes = read(FULL)
    large = harnesses(FULL)["large"]
    assert (large.health.path, large.health.timeout_s, large.stop_timeout_s) == ("/ready", 500.0, 20.0)
    assert (large.upstream_model, large.max_concurrent) == ("org/large", 3)
    assert large.strip_params == ("temperature", "top_p")
    assert large.set_params == {"top_k": 20, "stop": ["a"], "chat_template_kwargs": {"effort": "medium"}}
    entry = next(entry for entry in node.models if entry.id == "large")
    assert (entry.source, entry.context_tokens) == ("/models/large.gguf", 16384)
    assert (entry.devices, entry.tensor_parallel) == ((0, 1, 2), 3)
    spec = catalogue.spec("large")
    assert (spec.ttl_s, spec.context_tokens, spec.tensor_parallel, spec.only_on) == (60.0, 16384, 3, ("local",))
    assert catalogue.aliases == {"gpt-4o-mini": "large", "big": "large", "large:high": "large"}
    assert any("large:high" in note for note in notes)
    assert any("metadata, name, sendLoadingState, timeouts" in note for note in notes)


def test_ttl_of_a_model_is_its_own_or_that_of_all() -> None:
    assert {name: spec.ttl_s for name, spec in specs(FULL).items()} == {
        "large": 60.0,
        "fixed": None,
        "container": 300.0,
        "portless": 300.0,
    }


def test_fixed_port_becomes_the_port_that_the_node_chooses() -> None:
    fixed = harnesses(FULL)["fixed"]
    model = ("-m", "${env.HOME}/models/fixed.gguf")
    assert fixed.cmd == ("/opt/server", "--listen", "127.0.0.1:${PORT}", "--port=${PORT}", "--seed", "18999", *model)
    notes = read(FULL)[3]
    assert any("port 8999" in note for note in notes)
    assert any(note.startswith("portless: its cmd has no port") for note in notes)


def test_container_keeps_its_paths_and_is_stopped_by_name() -> None:
    container = harnesses(FULL)["container"]
    assert container.cmd[-2:] == ("--model", "/models/a b.gguf")
    assert container.cmd_stop == ("docker", "stop", "${MODEL_ID}")
    assert container.health.path == "none"


def test_peers_are_nodes_and_keys_are_not_written() -> None:
    config, notes = read(FULL)[2:]
    nodes = {node.name: node for node in config.neurons}
    assert (nodes["local"].kind, nodes["local"].endpoint) == ("neuron", "http://127.0.0.1:13131")
    assert (nodes["other-swap"].kind, nodes["other-swap"].endpoint) == ("openai", "http://192.168.1.23")
    assert nodes["cloud"].key_env == "CLOUD_API_KEY"
    assert nodes["paid"].key_env == "PAID_KEY"
    assert not any("sk-" in text for text in convert(yaml.safe_load(FULL)).files.values())
    assert any("PAID_KEY" in note for note in notes)
    assert any(note.startswith("apiKeys are not imported") for note in notes)


def test_preloaded_models_are_loaded_at_start() -> None:
    assert [default.id for default in read(FULL)[1].default_models] == ["fixed"]


def test_groups_are_pins_and_priorities() -> None:
    found = specs(GROUPS)
    assert {name: (spec.policy, spec.priority) for name, spec in found.items()} == {
        "a": ("pinned", 0),
        "b": ("on_demand", -1),
        "c": ("on_demand", 0),
    }


def test_costs_of_the_matrix_are_priorities() -> None:
    assert {name: spec.priority for name, spec in specs(MATRIX).items()} == {"gemma": 0, "voice": 49}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "no `models`"),
        ("models: {}", "no `models`"),
        ("models: {m: {cmd: 7}}", "the model m has no `cmd`"),
        ("models: {m: {cmd: 's ${nowhere}'}}", r"the model m: the macro \$\{nowhere\} is not defined"),
        ("macros: {a: '${b}', b: '${a}'}\nmodels: {m: {cmd: 's ${a}'}}", "refers to itself"),
        ('models: {m: {cmd: "s \'unclosed"}}', "the model m: No closing quotation"),
        ("models: {m: {cmd: '# nothing'}}", "its cmd is empty"),
        ("models: {m: {cmd: 's ${PORT}'}}\npeers: {p: {}}", "the peer p has no `proxy`"),
        ("models: {m: {cmd: 's ${PORT}', ttl: soon}}", "`ttl` is soon, which is no number"),
        ("models: {m: {cmd: 's ${PORT}', env: {A: b}}}", "`env` is .*; give a list"),
    ],
)
def test_what_cannot_be_imported_is_named(text: str, problem: str) -> None:
    with pytest.raises(NotLlamaSwap, match=problem):
        convert(yaml.safe_load(text))


ODD = ("odd", -1.5, ["odd", None], {"odd": ["odd"]}, [{"odd": 1}], date(2026, 1, 2))


@pytest.mark.parametrize("text", [FULL, GROUPS, MATRIX], ids=["full", "groups", "matrix"])
def test_values_of_other_types_are_rejected_or_read(text: str) -> None:
    original = yaml.safe_load(text)
    for *path, last in places(original):
        for odd in ODD:
            data = deepcopy(original)
            reduce(getitem, path, data)[last] = odd
            with contextlib.suppress(NotLlamaSwap):
                convert(data)


def places(data: Any) -> Iterator[tuple[Any, ...]]:
    """The paths of all values, at every depth."""
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for name, value in entries:
        yield (name,)
        yield from ((name, *rest) for rest in places(value))


def test_files_are_written_and_not_replaced_without_being_told(tmp_path: Path, invoke: Invoke) -> None:
    file = tmp_path / "llama-swap.yaml"
    file.write_text(MATRIX)
    result = invoke("import", str(file), "--out", str(tmp_path / "new"), "--json")
    assert result.code == ExitCode.OK, result.error
    assert [Path(path).name for path in json.loads(result.stdout)["files"]] == [
        "models.toml",
        "neuron.toml",
        "cortex.toml",
    ]
    models = tmp_path / "new" / "models.toml"
    models.write_text("mine")
    assert invoke("import", str(file), "--out", str(tmp_path / "new")).code == ExitCode.USAGE
    assert models.read_text() == "mine"
    result = invoke("import", str(file), "--out", str(tmp_path / "new"), "--force")
    assert "2 models" in result.stdout
    assert "gemma" in models.read_text()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (None, ExitCode.USAGE),
        ("a: [", ExitCode.CONFIG),
        ("models: {m: {cmd: 's ${PORT}', aliases: [n]}, n: {cmd: 's ${PORT}'}}", ExitCode.CONFIG),
        ("models: {torch: {cmd: 's ${PORT}'}}", ExitCode.CONFIG),
        ("!!python/object/apply:os.system ['touch executed']", ExitCode.CONFIG),
    ],
)
def test_unusable_file_writes_nothing(tmp_path: Path, text: str | None, code: ExitCode, invoke: Invoke) -> None:
    file = tmp_path / "llama-swap.yaml"
    if text is not None:
        file.write_text(text)
    result = invoke("import", str(file), "--out", str(tmp_path / "new"))
    assert result.code == code, result.error
    assert not (tmp_path / "new").exists()
    assert not Path("executed").exists()
