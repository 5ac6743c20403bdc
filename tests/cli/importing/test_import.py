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

from cortex.cli.importing import server_command
from cortex.cli.importing.llama_swap import KEYS, NotLlamaSwap, convert
from cortex.cli.importing.matrix_sets import MatrixProblem, expanded
from cortex.fleet.catalogue import Catalogue, ModelSpec, SwapGroup
from cortex.gateway.config import Config
from cortex.neuron.config import NeuronConfig
from cortex.neuron.servers.entry import HarnessEntry
from cortex.settings import loads
from cortex.system.exits import ExitCode

from .examples import EVERY, FULL, GROUPS, MATRIX, ROUTED_MATRIX

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


@pytest.mark.parametrize("text", [FULL, GROUPS])
def test_imported_gateway_starts_without_keys(text: str) -> None:
    _, _, config, notes = read(text)
    assert not config.public_addresses
    assert any("listens on 127.0.0.1:31313" in note for note in notes)


def test_command_has_its_macros_and_no_comments() -> None:
    large = harnesses(FULL)["large"]
    assert large.cmd == (
        *("/opt/llama/llama-server", "--port", "${PORT}", "--model", "${MODEL_PATH}", "--ctx-size", "16384"),
        *("--flash-attn", "true", "--temperature", "0.7", "--alias", "two words"),
    )
    assert large.env == {"KEY": "${env.SECRET}=x"}


def test_settings_of_a_model_stand_where_ours_are() -> None:
    catalogue, node = read(FULL)[:2]
    large = harnesses(FULL)["large"]
    assert (large.health.path, large.health.timeout_s, large.stop_timeout_s) == ("/ready", 500.0, 20.0)
    assert (large.upstream_model, large.max_concurrent) == ("org/large", 3)
    assert large.strip_params == ("temperature", "top_p")
    assert large.set_params == {"top_k": 20, "stop": ["a"]}
    entry = next(entry for entry in node.models if entry.id == "large")
    assert (entry.source, entry.context_tokens) == ("/models/large.gguf", 16384)
    assert (entry.devices, entry.tensor_parallel) == ((0, 1, 2), 3)
    spec = catalogue.spec("large")
    assert (spec.ttl_s, spec.context_tokens, spec.tensor_parallel, spec.only_on) == (60.0, 16384, 3, ("local",))
    assert (spec.max_requests, spec.loading_state, spec.metadata) == (3, "comment", {"port": "${PORT}"})
    aliases = {name for name, model in catalogue.alias_targets.items() if model == "large"}
    assert aliases == {"gpt-4o-mini", "big", "large:high"}


def test_parameters_of_a_name_are_those_of_an_alias() -> None:
    catalogue = read(FULL)[0]
    for name, effort in (("large", "medium"), ("big", "medium"), ("large:high", "high")):
        preset = catalogue.resolve(name).preset
        assert preset is not None
        assert preset.set_params == {"chat_template_kwargs": {"effort": effort}}


def test_ttl_of_a_model_is_its_own_or_that_of_all() -> None:
    assert {name: spec.ttl_s for name, spec in specs(FULL).items()} == {
        "large": 60.0,
        "fixed": 0.0,
        "container": None,
        "portless": None,
    }
    config = read(FULL)[2]
    assert (config.eviction.ttl_s, config.gateway.loading_state) == (300.0, "comment")


def test_fixed_port_becomes_the_port_that_the_node_chooses() -> None:
    fixed = harnesses(FULL)["fixed"]
    model = ("-m", "${env.HOME}/models/fixed.gguf")
    assert fixed.cmd == ("/opt/server", "--listen", "127.0.0.1:${PORT}", "--port=${PORT}", "--seed", "18999", *model)
    notes = read(FULL)[3]
    assert any("port 8999" in note for note in notes)
    assert any(note.startswith("portless: its cmd has no port") for note in notes)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("s --port 8080 -c 8080", ("s", "--port", "${PORT}", "-c", "8080")),
        ("s --http-port=8080 --lora /x/qwen-8080.bin", ("s", "--http-port=${PORT}", "--lora", "/x/qwen-8080.bin")),
        ("docker run -p 8080:8080 i", ("docker", "run", "-p", "${PORT}:8080", "i")),
        ("docker run -p 127.0.0.1:8080:80 i", ("docker", "run", "-p", "127.0.0.1:${PORT}:80", "i")),
        ("s --url http://localhost:8080/v1", ("s", "--url", "http://localhost:${PORT}/v1")),
        ("python -m http.server 8080 --seed 8080", ("python", "-m", "http.server", "${PORT}", "--seed", "8080")),
    ],
)
def test_fixed_port_is_replaced_only_where_it_is_a_port(command: str, expected: tuple[str, ...]) -> None:
    assert server_command.read(command, "http://localhost:8080").argv == expected


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


def test_groups_exclude_models_as_they_do_there() -> None:
    assert read(GROUPS)[0].swap_groups == {
        "forever": SwapGroup(members=("a",), swap=False, exclusive=True, persistent=True),
        "guests": SwapGroup(members=("b",), swap=False, exclusive=False),
        "rest": SwapGroup(members=("c",), swap=True, exclusive=True),
    }


def names_of(keys: Any) -> set[str]:
    """All names in a table of keys, at every depth."""
    return {str(name) for name, below in keys.items() if name != "*"}.union(
        *(names_of(below) for below in keys.values() if isinstance(below, dict))
    )


def test_the_example_has_every_key_that_is_known() -> None:
    used = {part for path in places(yaml.safe_load(EVERY)) for part in path}
    assert not names_of(KEYS) - used


def test_every_key_is_converted_or_named() -> None:
    original = yaml.safe_load(EVERY)
    imported = convert(deepcopy(original))
    noted = " ".join(imported.notes).replace(",", "").split()
    for *path, last in places(original):
        is_default = path[:1] == ["routing"] and last == "use"
        if is_default or any(".".join(map(str, path[:count])) in noted for count in range(2, len(path) + 1)):
            continue  # it says what holds without it, or all of its table is named
        data = deepcopy(original)
        del reduce(getitem, path, data)[last]
        try:
            without = convert(data)
        except NotLlamaSwap:  # it is required
            continue
        assert (without.files, without.notes) != (imported.files, imported.notes), (*path, last)


def test_left_out_keys_are_named_by_their_path() -> None:
    notes = " ".join(read(EVERY)[3])
    assert "models.first.timeouts.connect" in notes
    assert "performance.every" in notes
    assert "profiles.night.pins" in notes
    assert "peers.away.timeouts.connect" in notes


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ((), "novel"),
        (("models", "first"), "models.first.novel"),
        (("models", "first", "filters"), "models.first.filters.novel"),
        (("routing", "router", "settings", "groups", "all"), "routing.router.settings.groups.all.novel"),
        (("peers", "away"), "peers.away.novel"),
        (("selectors", "best", "settings"), "selectors.best.settings.novel"),
    ],
)
def test_key_that_is_not_known_is_rejected(path: tuple[str, ...], shown: str) -> None:
    data = yaml.safe_load(EVERY)
    reduce(getitem, path, data)["novel"] = 1
    with pytest.raises(NotLlamaSwap, match=f"`{shown}` is not a known llama-swap key"):
        convert(data)


def test_anchors_of_the_user_are_no_keys() -> None:
    imported = convert(yaml.safe_load("x-shared: &s {cmd: 's ${PORT}'}\nmodels: {m: *s}"))
    assert imported.num_models == 1


def test_routing_has_groups_priorities_or_the_matrix() -> None:
    found = specs(EVERY)
    assert (found["second"].queue_priority, read(EVERY)[0].together) == (7, ())
    catalogue = read(ROUTED_MATRIX)[0]
    assert {spec.id: spec.evict_cost for spec in catalogue.models} == {"gemma": 3.0, "voice": 50.0}
    assert (catalogue.together, catalogue.swap_groups) == ((("gemma", "voice"),), {})
    notes = read(EVERY)[3]
    assert "routing.router.settings.matrix is left out: routing.router.use is group" in notes
    with pytest.raises(NotLlamaSwap, match="give group or matrix"):
        convert(yaml.safe_load(ROUTED_MATRIX.replace("use: matrix", "use: dice")))


def test_peer_keeps_its_models_and_filters() -> None:
    catalogue, _, config, notes = read(EVERY)
    peer = next(node for node in config.neurons if node.name == "away")
    assert (peer.models, peer.strip_params, peer.set_params) == (("third",), ("top_k",), {"provider": {"zdr": True}})
    assert catalogue.aliases["away/third"] == "third"
    assert any("filters of stream" in note for note in notes)
    stripped = yaml.safe_load(EVERY)
    stripped["peers"]["away"]["filters"] = {"strip_params": ["n, top_k"]}
    assert any("filters of n " in note for note in convert(stripped).notes)


def test_selectors_are_aliases_of_their_first_model() -> None:
    catalogue, node, _, notes = read(EVERY)
    assert (catalogue.aliases["best"], catalogue.aliases["fixed-choice"]) == ("first", "first")
    assert any(note.startswith("the selector best is an alias of first, without warm and second") for note in notes)
    assert [each.id for each in node.default_models] == ["first"]
    assert any("no such models: ghost" in note for note in notes)


def test_models_keep_their_names_and_stay_unlisted() -> None:
    first = specs(EVERY)["first"]
    assert (first.display_name, first.description, first.unlisted) == ("First", "The first model", True)


def test_capabilities_are_in_our_words() -> None:
    spec = specs(EVERY)["second"]
    assert (spec.capabilities, spec.context_tokens) == (("chat", "tools", "vision", "rerank"), 4096)


def test_costs_of_the_matrix_are_costs_of_evictions() -> None:
    assert {name: spec.evict_cost for name, spec in specs(MATRIX).items()} == {"gemma": 1.0, "voice": 50.0}


@pytest.mark.parametrize(
    ("expression", "sets"),
    [
        ("a", [("a",)]),
        ("a & b", [("a", "b")]),
        ("a | b", [("a",), ("b",)]),
        ("a | b & c", [("a",), ("b", "c")]),
        ("(a | b) & (c | d)", [("a", "c"), ("a", "d"), ("b", "c"), ("b", "d")]),
        ("+other & v", [("x", "v"), ("y", "v")]),
    ],
)
def test_sets_of_the_matrix_are_expanded(expression: str, sets: list[tuple[str, ...]]) -> None:
    assert expanded("s", {"s": expression, "other": "x | y"}) == sets


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("a &", "lacks a model"),
        ("(a", r"lacks a `\)`"),
        ("a b", "from `b` on"),
        ("+s", "refers to itself"),
        ("+nothing", "no set nothing"),
        ("", "is empty"),
        (" & ".join(["(a | b)"] * 20), "more than 1000"),
    ],
)
def test_unreadable_sets_of_the_matrix_are_rejected(expression: str, problem: str) -> None:
    with pytest.raises(MatrixProblem, match=problem):
        expanded("s", {"s": expression})


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
        ("models: {m: {cmd: 's ${PORT}', ttl: soon}}", "`ttl` is soon, which is not a number"),
        ("models: {m: {cmd: 's ${PORT}', env: {A: b}}}", "`env` is .*; give a list"),
    ],
)
def test_what_cannot_be_imported_is_named(text: str, problem: str) -> None:
    with pytest.raises(NotLlamaSwap, match=problem):
        convert(yaml.safe_load(text))


ODD = ("odd", -1.5, ["odd", None], {"odd": ["odd"]}, [{"odd": 1}], date(2026, 1, 2))


@pytest.mark.parametrize("text", [FULL, EVERY, GROUPS, MATRIX], ids=["full", "every", "groups", "matrix"])
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
        ("models: {m: {cmd: 's ${PORT}', metadata: &own {itself: *own}}}", ExitCode.CONFIG),
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
