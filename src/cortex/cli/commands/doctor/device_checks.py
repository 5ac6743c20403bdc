"""The devices of this machine: what each can run natively, and what through a harness."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cortex.cli.commands.doctor.checks import Finding, Severity, driver_remedy
from cortex.cli.output import size
from cortex.system.engine_packages import missing_packages
from cortex.wire.node.protocol import Device

if TYPE_CHECKING:
    from cortex.neuron.config import NeuronConfig
    from cortex.neuron.worker.discovery import Inventory

_OTHER_DRIVERS = {"i915": "Intel", "xe": "Intel", "asahi": "Apple", "nouveau": "NVIDIA (nouveau)", "msm": "Qualcomm"}


def devices(config: NeuronConfig | None = None, root: Path = Path("/")) -> Iterator[Finding]:
    """The devices, as a neuron with this configuration sees them; None for a machine that may not be a node. `root` of
    the drivers' files is for tests."""
    from cortex.neuron.config import NeuronConfig  # here: it imports much of a node
    from cortex.neuron.node.devices import inventory_of
    from cortex.neuron.servers.ready_made import usable

    inventory = inventory_of(config or NeuronConfig())
    yield from findings(inventory, config or NeuronConfig(), missing_packages(), root)
    if (
        config is not None
        and not usable(config.commands)
        and (missing_packages() or inventory.devices[0].kind == "rocm")
    ):
        remedy = "add a server under [[harnesses]] of neuron.toml, or install the engine"
        yield Finding(
            "devices", Severity.PROBLEM, "this host cannot run models: it has neither the engine nor a harness", remedy
        )
    if config is not None:
        yield from missing_programs(config)
    if inventory.driver_problem and Path("/dev/nvidiactl").exists():
        yield Finding("devices", Severity.PROBLEM, inventory.driver_problem, driver_remedy())


def findings(
    inventory: Inventory, config: NeuronConfig, missing: tuple[str, ...], root: Path = Path("/")
) -> Iterator[Finding]:
    from cortex.neuron.worker.discovery import with_amd_cards

    for device in inventory.devices:
        reading = inventory.readings.get(device.index)
        free = f", {size(reading.free_bytes)} free" if reading else ""
        what = f"{device.name}: {size(device.total_bytes)}{free}; {_abilities(device, config, missing)}"
        yield Finding("devices", Severity.FINE, what)
    if inventory.devices[0].kind == "cpu":
        amd = [device.name for device in with_amd_cards(inventory, root=root).devices if device.kind == "rocm"]
        for name in (*amd, *_other_gpus(root)):
            remedy = "add a server that supports it under [[harnesses]] of neuron.toml"
            if name not in amd:
                remedy += "; the memory of its models counts as the host's"
            yield Finding("devices", Severity.NOTE, f"{name}: not used natively", remedy)


def missing_programs(config: NeuronConfig) -> Iterator[Finding]:
    """Configured harnesses whose program is missing on this machine. A program named by a variable is not checked."""
    for entry in config.commands:
        program, path = entry.commands["cmd"][0], entry.env.get("PATH")
        if "${" not in program + (path or "") and shutil.which(program, path=path) is None:
            what = f"the harness {entry.name} cannot start: there is no program {program}"
            remedy = f"install {program}, or correct `cmd` of this entry of [[harnesses]] in neuron.toml"
            yield Finding("devices", Severity.PROBLEM, what, remedy)


def _abilities(device: Device, config: NeuronConfig, missing: tuple[str, ...]) -> str:
    from cortex.neuron.servers.ready_made import usable

    harnesses = ", ".join(usable(config.commands)) or "any server of [[harnesses]]"
    if device.kind == "rocm":
        return f"natively: nothing; through a harness: {harnesses}"
    if missing:
        return f"natively: nothing ({', '.join(missing)} not installed); through a harness: {harnesses}"
    natively = "every supported model" if device.kind == "cuda" else "every supported model, at the speed of a CPU"
    return f"natively: {natively}; through a harness: {harnesses}"


def _other_gpus(root: Path) -> Iterator[str]:
    """GPUs whose memory no installed driver reports."""
    for card in sorted((root / "sys/class/drm").glob("card[0-9]")):
        driver = (card / "device" / "driver").resolve().name
        if driver in _OTHER_DRIVERS:
            yield f"{_OTHER_DRIVERS[driver]} GPU ({card.name}, driver {driver})"
