"""The checks of `doctor`. Each yields findings; a finding that is not fine has a remedy."""

from __future__ import annotations

import contextlib
import http.client
import importlib.metadata
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
from cortex.cli import fleet_view
from cortex.cli.client import GatewayClient, GatewayUnreachable
from cortex.cli.failures import CommandError
from cortex.cli.output import size
from cortex.cli.up.demo import SMOLLM2
from cortex.cli.up.plan import reachable
from cortex.http.tls import client_context
from cortex.settings import Listen, SettingsError
from cortex.system.cache_folder import cache_folder
from cortex.system.engine_packages import REMEDY, missing_packages
from cortex.wire.node.protocol import Discovery, Health
from cortex.wire.words import plural

VERSIONS_REMEDY = "install the tested versions: packaging/requirements-neuron.lock in a checkout"
_LIBRARIES = ("torch", "triton", "transformers")
LOW_DISK_BYTES = 20 << 30
"""Most model downloads need more than this."""


class Severity(StrEnum):
    FINE = "fine"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `remedy` is empty when it is fine."""

    topic: str
    verdict: Severity
    what: str
    remedy: str = ""


def versions() -> Iterator[Finding]:
    python = platform.python_version()
    yield Finding("versions", Severity.FINE, f"cortex {__version__} on Python {python}, {platform.system()}")


def engine() -> Iterator[Finding]:
    """Whether this machine can run models natively."""
    if missing := missing_packages():
        what = f"{', '.join(missing)} not installed: enough for a gateway, or for a node that runs harnesses only"
        yield Finding("engine", Severity.NOTE, what, f"to run models natively on this machine: {REMEDY}")
        return
    # Here, because a gateway-only installation lacks it.
    from cortex.neuron.kernels.native.library import compiler, may_have_library

    if (command := compiler()) is None:
        what = "no C compiler: matrix products on CPUs are slower and take more memory, and GPU kernels cannot be built"
        yield Finding("engine", Severity.NOTE, what, "install gcc or clang, for example: apt install gcc libc6-dev")
    elif not may_have_library():
        what = f"C compiler {command} failed: matrix products on CPUs are slower and take more memory"
        yield Finding("engine", Severity.NOTE, what, "fix the cause, which the node's log has, and load a model again")
    else:
        yield Finding("engine", Severity.FINE, f"C compiler {command}")


def libraries() -> Iterator[Finding]:
    """The private interfaces of torch, Triton and transformers that the engine uses. Imports torch."""
    if missing_packages():
        return
    try:
        from cortex.neuron.private_api.report import probed
    except Exception as error:  # noqa: BLE001 - whatever a broken installation raises
        what = f"torch cannot be imported: {str(error).partition(chr(10))[0] or type(error).__name__}"
        yield Finding("libraries", Severity.PROBLEM, what, f"install it again: {REMEDY}")
        return
    entries = probed()
    for entry in entries:
        if entry.problem is not None:
            what = f"{entry.name} cannot be used: {entry.problem}; instead: {entry.fallback}"
            yield Finding("libraries", Severity.NOTE, what, VERSIONS_REMEDY)
    if all(entry.problem is None for entry in entries):
        versions = ", ".join(f"{name} {found}" for name in _LIBRARIES if (found := _version(name)) is not None)
        yield Finding("libraries", Severity.FINE, f"{versions}: everything that the engine uses is available")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def gateway(client: GatewayClient, config: Path | None) -> Iterator[Finding]:
    """Whether a gateway responds, and what it reports about itself. `config`: its file, if that is known."""
    try:
        health = client.get("/health")
        yield Finding("gateway", Severity.FINE, f"{client.url} responds")
        for reason in health.get("reasons", ()):
            remedy = "see `cortex status`, and the log of the gateway or of the node"
            yield Finding("gateway", Severity.NOTE, str(reason), remedy)
    except CommandError as error:
        is_absent = config is not None and isinstance(error, GatewayUnreachable)
        remedy = f"start it with `cortex serve --config {config}`" if is_absent else error.remedy
        yield Finding("gateway", Severity.NOTE, error.message, remedy)


def models(client: GatewayClient) -> Iterator[Finding]:
    """The models whose files no node has, although their `source` is a path."""
    try:
        listed = client.get("/v1/models")["data"]
    except CommandError:  # the check of the gateway reports the reason
        return
    for line in fleet_view.missing_files(listed):
        yield Finding("models", Severity.PROBLEM, line, "correct its `source` in models.toml")


@dataclass(frozen=True, slots=True)
class NodeEndpoint:
    """A node, as seen by the program that connects to it."""

    topic: str
    name: str
    url: str
    key_variable: str | None
    ca_file: Path | None
    kind: str = "neuron"

    def check(self, program: str) -> Iterator[Finding]:
        """`program`: the one that needs the key."""
        key = os.environ.get(self.key_variable, "").strip() if self.key_variable else None
        if self.key_variable and not key:
            yield self._problem(f"{self.key_variable} is not set", f"export {self.key_variable}=… where {program} runs")
        try:
            client = GatewayClient(self.url, key, 5.0, tls=client_context(self.ca_file))
            if self.kind == "openai":
                client.get("/v1/models")
                yield Finding(self.topic, Severity.FINE, f"{self.name}: {self.url} responds")
            else:
                yield from self._discovered(msgspec.convert(client.get("/discovery"), Discovery))
                yield from self._fallbacks(msgspec.convert(client.get("/health"), Health))
        except GatewayUnreachable as error:
            what = f"no response from {self.url} ({error.reason})"
            start = "start it" if self.kind == "openai" else "start it with `neuron serve`"
            yield self._problem(what, f"{start}, or correct its endpoint")
        except SettingsError as error:
            yield self._problem(error.message, "correct ca_file")
        except (CommandError, msgspec.ValidationError) as error:
            problem = error.message if isinstance(error, CommandError) else error
            what = f"unexpected response from {self.url} ({problem})"
            yield self._problem(what, "correct its endpoint, kind or key_env")

    def _problem(self, what: str, remedy: str) -> Finding:
        return Finding(self.topic, Severity.PROBLEM, f"{self.name}: {what}", remedy)

    def _discovered(self, discovery: Discovery) -> Iterator[Finding]:
        devices = ", ".join(f"{device.name} {size(device.total_bytes)}" for device in discovery.devices)
        yield Finding(self.topic, Severity.FINE, f"{self.name}: {devices}")
        if discovery.version != __version__:
            what = f"{self.name} runs version {discovery.version}, this is {__version__}"
            yield Finding(self.topic, Severity.NOTE, what, "install the same version on both")
        if discovery.driver_problem:
            yield Finding(self.topic, Severity.NOTE, f"{self.name}: {discovery.driver_problem}", driver_remedy())

    def _fallbacks(self, health: Health) -> Iterator[Finding]:
        for device in health.devices:
            for fallback in device.fallbacks:
                what = f"{self.name}: device {device.index} runs without {fallback.name}: {fallback.reason}"
                yield Finding(self.topic, Severity.NOTE, what, VERSIONS_REMEDY)


def driver_remedy() -> str:
    return "see `nvidia-smi`; after a driver update, reboot or reload the module"


def ports(listens: tuple[Listen, ...]) -> Iterator[Finding]:
    """Whether the addresses can be bound."""
    for listen in listens:
        family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        try:
            socket.create_server((listen.host, listen.port), family=family).close()
            yield Finding("ports", Severity.FINE, f"{listen} is free")
        except OSError as error:
            if _is_ours(listen):
                yield Finding("ports", Severity.FINE, f"{listen} is in use by cortex")
                continue
            remedy = "ignore this if cortex itself listens there; else stop that program or choose another port"
            yield Finding("ports", Severity.NOTE, f"{listen}: {os.strerror(error.errno or 0)}", remedy)


def _is_ours(listen: Listen) -> bool:
    """Whether a gateway, its metrics or a neuron responds there."""
    for path, mark in (("/health", b'"status"'), ("/metrics", b"cortex_")):
        with contextlib.closing(http.client.HTTPConnection(reachable(listen.host), listen.port, timeout=2)) as probe:
            try:
                probe.request("GET", path)
                if mark in probe.getresponse().read(1 << 20):
                    return True
            except (OSError, http.client.HTTPException):
                return False  # also a port with TLS, whose certificate may have any name
    return False


def disk(hub_cache: Path | None = None) -> Iterator[Finding]:
    """Free disk space in the model caches."""
    folders = {"cortex cache": cache_folder(), "model cache": hub_cache or hub_cache_folder()}
    for name, folder in folders.items():
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free_bytes = shutil.disk_usage(existing).free
        what = f"{name} {folder}: {size(free_bytes)} free"
        if not os.access(existing, os.W_OK):
            yield Finding("disk", Severity.PROBLEM, f"{name} {folder} cannot be written", "fix its permissions")
        elif free_bytes < SMOLLM2.wheel_bytes + SMOLLM2.size_bytes:
            yield Finding("disk", Severity.PROBLEM, what, "free space, or set CORTEX_CACHE / HF_HOME to another disk")
        elif free_bytes < LOW_DISK_BYTES:
            yield Finding("disk", Severity.NOTE, what, "large models do not fit; set HF_HOME to a larger disk")
        else:
            yield Finding("disk", Severity.FINE, what)


def kv_disk(
    folder: Path, kv_disk_mb: int, root: Path = Path("/"), low_bytes: int = LOW_DISK_BYTES
) -> Iterator[Finding]:
    """Whether the disk for KV pages, configured or possible, is fast enough and has more than `low_bytes` free. `root`
    is for tests."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free_bytes, is_rotating = shutil.disk_usage(existing).free, _is_rotating(existing, root)
    if kv_disk_mb and is_rotating:
        what = f"{folder} is on a rotating disk: KV pages are read more slowly than they are computed"
        yield Finding("disk", Severity.NOTE, what, "set limits.kv_disk_dir to an SSD, or limits.kv_disk_mb = 0")
    elif kv_disk_mb and free_bytes < kv_disk_mb << 20:
        what = f"{folder}: {size(free_bytes)} free, less than limits.kv_disk_mb"
        yield Finding("disk", Severity.NOTE, what, "free space, or lower limits.kv_disk_mb")
    elif not kv_disk_mb and is_rotating is False and free_bytes >= 2 * low_bytes:
        what = f"{folder} is on an SSD: conversations could survive restarts there"
        remedy = f"to keep KV pages on disk, set limits.kv_disk_mb = {free_bytes // 10 >> 20}"
        yield Finding("disk", Severity.FINE, f"{what}; {remedy}")


def _is_rotating(path: Path, root: Path) -> bool | None:
    """Whether the disk of a file rotates; None if unknown, as for network or RAM file systems."""
    device = path.stat().st_dev
    link = root / "sys/dev/block" / f"{os.major(device)}:{os.minor(device)}"
    for folder in (link, link / ".."):  # a partition has no queue of its own
        with contextlib.suppress(OSError):
            return (folder / "queue/rotational").read_text().strip() == "1"
    return None


def hub_cache_folder() -> Path:
    """The directory of models that a neuron on this machine has downloaded."""
    from cortex.neuron.weights.hub.cache import cache_directory  # here, because a gateway-only installation lacks it

    return cache_directory(os.environ)


def cache(hub_cache: Path | None = None) -> Iterator[Finding]:
    """Models that are already on disk."""
    demo = cache_folder() / "models" / SMOLLM2.file_name
    if not demo.exists():
        yield Finding("cache", Severity.FINE, "no demo model yet: the first `cortex up` downloads 93 MB")
    elif demo.stat().st_size != SMOLLM2.size_bytes:
        yield Finding("cache", Severity.NOTE, f"{demo} is damaged", "the next `cortex up` downloads it again")
    else:
        yield Finding("cache", Severity.FINE, f"the demo model is in {demo.parent}")
    folders = (hub_cache or hub_cache_folder()).glob("models--*")
    models = sorted(folder.name.removeprefix("models--") for folder in folders)
    if models:
        names = ", ".join(name.replace("--", "/") for name in models[:5]) + (", …" if len(models) > 5 else "")
        yield Finding("cache", Severity.FINE, f"{plural(len(models), 'model')} from the hub: {names}")
