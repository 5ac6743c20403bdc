"""What `doctor` looks at. Each check gives findings; a finding that is not fine says what to do."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from cortex import __version__
from cortex.cli.cache import cache_directory
from cortex.cli.client import GatewayClient
from cortex.cli.failures import CommandError
from cortex.cli.output import size
from cortex.cli.up.demo import SMOLLM2
from cortex.cli.up.plan import reachable
from cortex.gateway.config import GatewaySection, load
from cortex.gateway.server import catalogue_path, load_catalogue
from cortex.settings import Listen, SettingsError
from cortex.wire.node import Discovery

LOW_DISK_BYTES = 20 << 30
"""Below this, most model downloads will not fit."""


class Severity(StrEnum):
    FINE = "fine"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `remedy` is empty when it is fine."""

    topic: str
    verdict: Severity
    what: str
    remedy: str = ""


def versions() -> Iterator[Finding]:
    python = platform.python_version()
    yield Finding("versions", Severity.FINE, f"cortex {__version__} on Python {python}, {platform.system()}")


def engine() -> Iterator[Finding]:
    """Whether this machine can run a neuron."""
    missing = [name for name in ("torch", "aiohttp", "tokenizers", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        what = f"gateway only: {', '.join(missing)} not installed"
        yield Finding("engine", Severity.NOTE, what, "to serve models on this machine: pip install 'cortex[neuron]'")
    else:
        yield Finding("engine", Severity.FINE, f"torch {importlib.metadata.version('torch')}")


def config(path: Path | None) -> Iterator[Finding]:
    """The gateway's file and the catalogue beside it."""
    if path is None:
        yield Finding("config", Severity.FINE, "none given: defaults and CORTEX_… variables apply")
    try:
        settings = load(path, os.environ)
        if path is not None:
            yield Finding("config", Severity.FINE, f"{path}: {len(settings.neurons)} nodes")
        if (catalogue := catalogue_path(settings, path)).exists():
            models = load_catalogue(settings, path).models
            yield Finding("config", Severity.FINE, f"{catalogue}: {len(models)} models")
    except SettingsError as error:
        yield Finding("config", Severity.PROBLEM, error.message, "correct that line")


def gateway(client: GatewayClient) -> Iterator[Finding]:
    """Whether a gateway answers."""
    try:
        client.get("/health")
        yield Finding("gateway", Severity.FINE, f"{client.url} answers")
    except CommandError as error:
        yield Finding("gateway", Severity.NOTE, error.message, error.remedy)


def nodes(path: Path | None) -> Iterator[Finding]:
    """Every node of the configuration: reachable, of our version, with usable devices."""
    try:
        settings = load(path, os.environ)
    except SettingsError:
        return  # reported by `config`
    for section in settings.neurons:
        key = os.environ.get(section.key_env) if section.key_env else None
        if section.key_env and not key:
            what = f"{section.name}: {section.key_env} is not set"
            yield Finding("nodes", Severity.PROBLEM, what, f"export {section.key_env}=… where the gateway runs")
        client = GatewayClient(section.endpoint, key, 5.0)
        try:
            if section.kind == "openai":
                client.get("/v1/models")
                yield Finding("nodes", Severity.FINE, f"{section.name}: {section.endpoint} answers")
            else:
                yield from _node(section.name, msgspec.convert(client.get("/discovery"), Discovery))
        except (CommandError, msgspec.ValidationError) as error:
            what = f"{section.name}: no answer from {section.endpoint} ({error})"
            yield Finding(
                "nodes", Severity.PROBLEM, what, "start it there with `neuron serve`, or correct its endpoint"
            )


def _node(name: str, discovery: Discovery) -> Iterator[Finding]:
    devices = ", ".join(f"{device.name} {size(device.total_bytes)}" for device in discovery.devices)
    yield Finding("nodes", Severity.FINE, f"{name}: {devices}")
    if discovery.version != __version__:
        what = f"{name} runs version {discovery.version}, this is {__version__}"
        yield Finding("nodes", Severity.NOTE, what, "bring both to the same version")
    if discovery.driver_problem:
        yield Finding("nodes", Severity.NOTE, f"{name}: {discovery.driver_problem}", _driver_remedy())


def devices() -> Iterator[Finding]:
    """The devices of this machine, as a neuron would see them."""
    if importlib.util.find_spec("pynvml") is None:
        return  # without the engine there is nothing to serve with; `engine` says so
    from cortex.neuron.worker.discovery import discover

    inventory = discover()
    for device in inventory.devices:
        reading = inventory.readings.get(device.index)
        free = f", {size(reading.free_bytes)} free" if reading else ""
        yield Finding("devices", Severity.FINE, f"{device.name}: {size(device.total_bytes)}{free}")
    if inventory.driver_problem and Path("/dev/nvidiactl").exists():
        yield Finding("devices", Severity.PROBLEM, inventory.driver_problem, _driver_remedy())


def _driver_remedy() -> str:
    return "see `nvidia-smi`; after a driver update, reboot or reload the module"


def addresses(path: Path | None) -> tuple[Listen, ...]:
    """Where gateway, metrics and a neuron on this machine listen or would, as seen from here; the gateway first."""
    gateway = GatewaySection(listen=Listen("127.0.0.1:31313"), metrics_listen=Listen("127.0.0.1:31314"))
    if path is not None:
        with contextlib.suppress(SettingsError):  # reported by `config`
            gateway = load(path, os.environ).gateway
    found = (gateway.listen, gateway.metrics_listen, Listen("127.0.0.1:13131"))
    return tuple(_from_here(listen) for listen in found if listen is not None)


def _from_here(listen: Listen) -> Listen:
    host = reachable(listen.host)
    return Listen(f"[{host}]:{listen.port}" if ":" in host else f"{host}:{listen.port}")


def ports(listens: tuple[Listen, ...]) -> Iterator[Finding]:
    """Whether what we would listen on is free."""
    for listen in listens:
        family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        try:
            socket.create_server((listen.host, listen.port), family=family).close()
            yield Finding("ports", Severity.FINE, f"{listen} is free")
        except OSError as error:
            remedy = "fine if that is cortex itself; else stop it or choose another port"
            yield Finding("ports", Severity.NOTE, f"{listen}: {os.strerror(error.errno or 0)}", remedy)


def disk() -> Iterator[Finding]:
    """Room for models, where they are kept."""
    folders = {"cortex cache": cache_directory(), "model cache": hub_cache_directory()}
    for name, folder in folders.items():
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free_bytes = shutil.disk_usage(existing).free
        what = f"{name} {folder}: {size(free_bytes)} free"
        if not os.access(existing, os.W_OK):
            yield Finding("disk", Severity.PROBLEM, f"{name} {folder} cannot be written", "give yourself access to it")
        elif free_bytes < SMOLLM2.wheel_bytes + SMOLLM2.size_bytes:
            yield Finding("disk", Severity.PROBLEM, what, "free some, or set CORTEX_CACHE / HF_HOME to another disk")
        elif free_bytes < LOW_DISK_BYTES:
            yield Finding("disk", Severity.NOTE, what, "large models will not fit; set HF_HOME to a larger disk")
        else:
            yield Finding("disk", Severity.FINE, what)


def hub_cache_directory() -> Path:
    """Where a neuron on this machine keeps downloaded models."""
    from cortex.neuron.weights.hub.cache import cache_directory  # not at the top: a gateway alone needs none of it

    return cache_directory(os.environ)


def cache() -> Iterator[Finding]:
    """What is already here, so that a start needs no network."""
    demo = cache_directory() / "models" / SMOLLM2.file_name
    if not demo.exists():
        yield Finding("cache", Severity.FINE, "the demo model is not here yet: the first `cortex up` fetches 93 MB")
    elif demo.stat().st_size != SMOLLM2.size_bytes:
        yield Finding("cache", Severity.NOTE, f"{demo} is damaged", "the next `cortex up` fetches it again")
    else:
        yield Finding("cache", Severity.FINE, f"the demo model is in {demo.parent}")
    models = sorted(folder.name.removeprefix("models--") for folder in hub_cache_directory().glob("models--*"))
    if models:
        names = ", ".join(name.replace("--", "/") for name in models[:5]) + (", …" if len(models) > 5 else "")
        yield Finding("cache", Severity.FINE, f"{len(models)} models from the hub: {names}")
