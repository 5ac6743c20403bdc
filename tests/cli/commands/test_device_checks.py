"""What `doctor` says about devices, with recorded trees of /sys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from cortex.cli.commands.doctor.device_checks import findings, missing_programs
from cortex.neuron.config import NeuronConfig
from cortex.neuron.servers.entry import HarnessEntry
from cortex.neuron.worker.discovery import Inventory, with_amd_cards
from cortex.wire.node.protocol import Device

from ...neuron.worker.amd_trees import RADEON, STRIX_HALO, write

CPU = Inventory((Device(index=0, kind="cpu", name="a CPU", total_bytes=1 << 34),))
CUDA = Inventory((Device(index=0, kind="cuda", name="a card", total_bytes=1 << 34),))
WITH_SERVER = NeuronConfig(harnesses=(HarnessEntry(name="llama-server", cmd="llama-server --port ${PORT}"),))


@pytest.fixture(autouse=True)
def no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")


@pytest.mark.parametrize(
    ("inventory", "config", "missing", "expected"),
    [
        (
            CPU,
            NeuronConfig(),
            (),
            "every supported model, at the speed of a CPU; through a harness: any server",
        ),
        (CUDA, WITH_SERVER, (), "natively: every supported model; through a harness: llama-server"),
        (CUDA, WITH_SERVER, ("torch",), "natively: nothing (torch not installed); through a harness: llama-server"),
    ],
)
def test_each_device_says_what_it_can_do(
    inventory: Inventory, config: NeuronConfig, missing: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    [finding] = findings(inventory, config, missing, tmp_path)
    assert expected in finding.what


def test_servers_on_the_path_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    [finding] = findings(CUDA, NeuronConfig(), ("torch",), tmp_path)
    assert finding.what.endswith("through a harness: vllm")


def test_programs_of_harnesses_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    entries = (
        HarnessEntry(name="found", cmd="there ${PORT}"),
        HarnessEntry(name="by-path", cmd=(str(tmp_path / "there"), "${PORT}")),
        HarnessEntry(name="unknown", cmd="${env.SERVER} ${PORT}"),
        HarnessEntry(name="own-path", cmd="there ${PORT}", env={"PATH": "/nowhere"}),
        HarnessEntry(name="lost", cmd="/nowhere/server ${PORT}"),
    )
    found = list(missing_programs(NeuronConfig(harnesses=entries)))
    assert [finding.what for finding in found] == [
        "the harness own-path cannot start: there is no program there",
        "the harness lost cannot start: there is no program /nowhere/server",
    ]


def test_cards_of_amd_run_servers_only(tmp_path: Path) -> None:
    inventory = with_amd_cards(CPU, {}, write(tmp_path, RADEON))
    [finding] = findings(inventory, WITH_SERVER, (), tmp_path)
    assert finding.what.startswith(
        "AMD GPU 744c: 24.0 GiB, 23.8 GiB free; natively: nothing; through a harness: llama-s"
    )


@pytest.mark.parametrize(
    ("tree", "driver", "what", "remedy"),
    [
        (STRIX_HALO, None, "AMD GPU 1586: not used natively", "add a server"),
        ({}, "xe", "Intel GPU (card1, driver xe): not used natively", "counts as the host's"),
        ({}, "asahi", "Apple GPU (card1, driver asahi): not used natively", "counts as the host's"),
    ],
)
def test_gpus_that_the_engine_does_not_use_are_named(
    tmp_path: Path, tree: Mapping[str, str], driver: str | None, what: str, remedy: str
) -> None:
    write(tmp_path, tree)
    if driver is not None:
        device = tmp_path / "sys/class/drm/card1/device"
        device.mkdir(parents=True)
        (tmp_path / "drivers" / driver).mkdir(parents=True)
        (device / "driver").symlink_to(tmp_path / "drivers" / driver)
    found = list(findings(CPU, NeuronConfig(), (), tmp_path))
    assert found[-1].what == what
    assert remedy in found[-1].remedy
