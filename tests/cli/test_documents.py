"""Examples are valid, the reference page matches the types, and units, containers and documents name real commands."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path

import pytest

from cortex.cli.cortex import cortex
from cortex.cli.neuron import neuron
from cortex.cli.reference import configuration_page
from cortex.fleet.catalogue import Catalogue
from cortex.gateway.config import Config
from cortex.neuron.config import NeuronConfig
from cortex.neuron.node.loading.loader import MAX_DEVICES_PER_MODEL
from cortex.settings import Section, load

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "kind"), [("cortex.toml", Config), ("models.toml", Catalogue), ("neuron.toml", NeuronConfig)]
)
def test_example_is_valid_and_sets_something(name: str, kind: type[Section]) -> None:
    loaded = load(kind, ROOT / "examples" / name, env_prefix="EXAMPLE_", env={})
    assert loaded != kind()


def test_example_aliases_name_example_models() -> None:
    catalogue = load(Catalogue, ROOT / "examples" / "models.toml", env_prefix="EXAMPLE_", env={})
    assert catalogue.resolve("claude-3-5-haiku-latest").model_id == "small"
    assert catalogue.resolve("claude-3-5-haiku-latest").background
    assert catalogue.resolve("claude-sonnet-4").model_id == "coder"


def test_pinned_nodes_of_the_example_catalogue_exist_in_the_example_fleet() -> None:
    catalogue = load(Catalogue, ROOT / "examples" / "models.toml", env_prefix="EXAMPLE_", env={})
    fleet = load(Config, ROOT / "examples" / "cortex.toml", env_prefix="EXAMPLE_", env={})
    pinned = {node for model in catalogue.models for node in model.pinned_on}
    assert pinned <= {node.name for node in fleet.neurons}


def test_no_example_model_spans_more_devices_than_a_neuron_supports() -> None:
    catalogue = load(Catalogue, ROOT / "examples" / "models.toml", env_prefix="EXAMPLE_", env={})
    assert max(model.min_devices for model in catalogue.models) <= MAX_DEVICES_PER_MODEL


def test_configuration_page_matches_the_types() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == configuration_page(), "run `make docs`"


def unit(name: str) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(ROOT / "packaging" / "systemd" / name)
    return parser


@pytest.mark.parametrize(("name", "group"), [("cortex.service", cortex), ("neuron.service", neuron)])
def test_systemd_unit_starts_an_existing_command(name: str, group: object) -> None:
    program, command, *options = shlex.split(unit(name)["Service"]["ExecStart"])
    assert program.endswith(f"/{group.name}")  # type: ignore[attr-defined]
    known = {text for parameter in group.commands[command].params for text in parameter.opts}  # type: ignore[attr-defined]
    assert {option for option in options if option.startswith("--")} <= known


@pytest.mark.parametrize(
    ("name", "drain_s"), [("cortex.service", Config().gateway.drain_s), ("neuron.service", NeuronConfig().drain_s)]
)
def test_systemd_unit_waits_longer_than_the_program_drains(name: str, drain_s: float) -> None:
    assert float(unit(name)["Service"]["TimeoutStopSec"]) > drain_s + 10


def test_prometheus_configuration_uses_the_default_ports() -> None:
    text = (ROOT / "packaging" / "prometheus" / "prometheus.yml").read_text()
    ports = {int(port) for port in re.findall(r":(\d+)\"", text)}
    metrics = Config().gateway.metrics_listen
    assert metrics is not None
    assert ports == {metrics.port, NeuronConfig().address.port}


@pytest.mark.parametrize(
    ("name", "ports"),
    [("Containerfile.cortex", [31313, 31314]), ("Containerfile.neuron", [NeuronConfig().address.port])],
)
def test_containerfile_copies_existing_files_and_checks_health_on_the_right_port(name: str, ports: list[int]) -> None:
    text = (ROOT / "packaging" / "container" / name).read_text().replace("\\\n", " ")
    copied = [path for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M) for path in line.split()]
    assert copied
    assert all((ROOT / path).exists() for path in copied)
    exposed = re.findall(r"^EXPOSE (.*)$", text, re.M)
    assert exposed
    assert all([int(port) for port in line.split()] == ports for line in exposed)
    asked = re.findall(rf"^HEALTHCHECK .*127\.0\.0\.1:{ports[0]}/health", text, re.M)
    assert len(asked) == len(re.findall(r"^ENTRYPOINT", text, re.M))


def test_every_command_in_the_readme_exists() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    groups = {"cortex": cortex, "neuron": neuron}
    for program, command in re.findall(r"`(cortex|neuron) ([a-z]+)", text):
        assert command in groups[program].commands, f"{program} {command}"


def test_links_in_the_documents_exist() -> None:
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} points to {target}"
