"""Examples are valid, the reference page matches the types, and units, containers and documents name real commands."""

from __future__ import annotations

import configparser
import importlib.metadata
import re
import shlex
import tomllib
from pathlib import Path

import click
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cortex.cli.cortex import cortex
from cortex.cli.neuron import neuron
from cortex.cli.reference import configuration_page
from cortex.fleet.catalogue import Catalogue
from cortex.gateway.config import Config
from cortex.neuron.config import NeuronConfig
from cortex.settings import Section, load
from cortex.system.exits import MEANINGS, ExitCode

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


def test_configuration_page_matches_the_types() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == configuration_page(), "run `make docs`"


def test_exit_codes_are_documented_as_help_shows_them() -> None:
    written = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert "\n".join(f"| {code:d} | {MEANINGS[code]} |" for code in ExitCode) in written


def unit(name: str) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(ROOT / "packaging" / "systemd" / name)
    return parser


@pytest.mark.parametrize(("name", "group"), [("cortex.service", cortex), ("neuron.service", neuron)])
def test_systemd_unit_starts_an_existing_command(name: str, group: click.Group) -> None:
    program, command, *options = shlex.split(unit(name)["Service"]["ExecStart"])
    assert program.endswith(f"/{group.name}")
    found = group.get_command(click.Context(group), command)
    assert found is not None
    known = {text for parameter in found.params for text in parameter.opts}
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
    groups: dict[str, click.Group] = {"cortex": cortex, "neuron": neuron}
    known = {program: group.list_commands(click.Context(group)) for program, group in groups.items()}
    for program, command in re.findall(r"`(cortex|neuron) ([a-z]+(?:-[a-z]+)*)", text):
        assert command in known[program], f"{program} {command}"


def test_links_in_the_documents_exist() -> None:
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} points to {target}"


def test_the_map_of_the_architecture_stays_a_map() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 250
    pages = {page.name for page in (ROOT / "docs" / "architecture").iterdir()}
    assert pages == set(re.findall(r"\]\(architecture/([\w-]+\.md)\)", text))


def test_paths_in_the_documents_exist() -> None:
    """Whole or their end, such as `dispatch/queues.py` or `wire/fields/`."""
    folders = ("src", "tests", "bench", "packaging", "examples", "docs")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    known = [f"/{path.relative_to(ROOT).as_posix()}{'/' * path.is_dir()}" for path in paths]
    known += [f"/{path.name}{'/' * path.is_dir()}" for path in ROOT.iterdir()]
    to_be_written = {f"src/cortex/neuron/{folder}/cwm.py" for folder in ("families/descriptors", "models/families")}
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        named = set(re.findall(r"(?<![\w/.~])((?:[\w-]+/)*[\w-]+\.py)(?!\w)|`((?:[a-z_]+/)+)`", text))
        for path in {file or folder for file, folder in named} - to_be_written:
            assert any(each.endswith(f"/{path}") for each in known), f"{page.name} names {path}"


def locked(name: str) -> dict[str, tuple[Requirement, int]]:
    """The requirements of a lock file by name, and the number of their hashes."""
    text = (ROOT / "packaging" / f"requirements-{name}.lock").read_text().replace(" \\\n", " ")
    found: dict[str, tuple[Requirement, int]] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            requirement = Requirement(line.partition(" --hash")[0])
            found[canonicalize_name(requirement.name)] = (requirement, line.count("--hash=sha256:"))
    return found


@pytest.mark.parametrize(
    ("name", "absent"),
    [("build", ()), ("gateway", ()), ("neuron", ()), ("neuron-cpu", ("torch",))],
)
def test_lock_has_every_dependency_in_an_allowed_version_with_hashes(name: str, absent: tuple[str, ...]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = list(project["project"]["dependencies"])
    if name == "build":
        wanted = project["build-system"]["requires"]
    else:
        extras = ["neuron", "telemetry"] if name.startswith("neuron") else ["postgres", "telemetry"]
        wanted += [each for extra in extras for each in project["project"]["optional-dependencies"][extra]]
    lock = locked(name)
    assert all(num_hashes for _, num_hashes in lock.values())
    for requirement in map(Requirement, wanted):
        if requirement.name in absent:
            assert requirement.name not in lock
            continue
        (pin,) = lock[canonicalize_name(requirement.name)][0].specifier
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version), f"{requirement} is locked to {pin}; run `make locks`"


@pytest.mark.parametrize("name", ["gateway", "neuron-cpu"])
def test_lock_has_the_dependencies_of_its_packages(name: str) -> None:
    lock = locked(name)
    for package in lock:
        try:
            installed = importlib.metadata.version(package).partition("+")[0]
            needed = importlib.metadata.requires(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
        if not lock[package][0].specifier.contains(installed, prereleases=True):
            continue  # `make lowest` and `make next` run with other versions
        for requirement in map(Requirement, needed):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                assert canonicalize_name(requirement.name) in lock, f"{package} needs {requirement}; run `make locks`"


@pytest.mark.parametrize("name", ["Containerfile.cortex", "Containerfile.neuron"])
def test_containerfile_installs_nothing_that_is_not_locked(name: str) -> None:
    text = (ROOT / "packaging" / "container" / name).read_text()
    installs = re.findall(r"pip install (.*)", text)
    assert installs
    assert all("--require-hashes" in line or "--no-deps" in line for line in installs)


def test_build_context_has_what_the_containerfiles_copy() -> None:
    kept = [line[1:] for line in (ROOT / ".containerignore").read_text().splitlines() if line.startswith("!")]
    for file in (ROOT / "packaging" / "container").iterdir():
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", file.read_text(), re.M):
            assert all(path.split("/")[0] in kept for path in line.split()), line


@pytest.mark.parametrize("name", ["cortex.service", "neuron.service"])
def test_systemd_unit_bounds_memory_and_system_calls(name: str) -> None:
    service = unit(name)["Service"]
    assert service["MemoryMax"]
    assert service["SystemCallFilter"]
    assert service["NoNewPrivileges"] == "yes"
