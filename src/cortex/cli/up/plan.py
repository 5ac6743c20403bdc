"""The decisions of `cortex up` before it starts a process. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cortex.cli.failures import CommandError, ExitCode
from cortex.cli.up import run_files
from cortex.cli.up.run_files import Ports
from cortex.cli.up.sources import ModelSource
from cortex.gateway.config import Config
from cortex.settings import Listen

NODE_KEY_VARIABLE = "CORTEX_LOCAL_NODE_KEY"
"""Holds the key of the local node, for the gateway."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class UpPlan:
    """Ports, models and configuration of one run."""

    host: str
    ports: Ports
    models: tuple[ModelSource, ...]
    config: Path
    """The gateway's file: the user's own, or the one in `folder`."""
    folder: Path
    tls_cert: Path | None
    """The certificate of the gateway, if it speaks HTTPS."""
    has_keys: bool
    """Whether clients must send a key."""
    environment: Mapping[str, str]
    """Environment of the children: our own, plus the overrides that connect the two programs."""
    metrics_host: str = "127.0.0.1"

    @property
    def url(self) -> str:
        return f"{self._scheme}://{run_files.address(reachable(self.host), self.ports.gateway)}"

    @property
    def metrics_url(self) -> str:
        return f"{self._scheme}://{run_files.address(reachable(self.metrics_host), self.ports.metrics)}/metrics"

    @property
    def _scheme(self) -> str:
        return "http" if self.tls_cert is None else "https"

    @property
    def node_key(self) -> str | None:
        """A key of the local node; None when it needs none."""
        return self.environment.get(NODE_KEY_VARIABLE)

    @property
    def neuron_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.neuron}"


def distinct(sources: Iterable[ModelSource]) -> tuple[ModelSource, ...]:
    """The models without repetitions. Raises `CommandError` when two different ones have one name."""
    found: dict[str, ModelSource] = {}
    for model in sources:
        other = found.setdefault(model.id, model)
        if other != model:
            raise CommandError(
                f"{other.source} and {model.source} have the same name {model.id}", "rename one of them", ExitCode.USAGE
            )
    return tuple(found.values())


def metrics_host(settings: Config) -> str:
    """The host of the metrics, which name keys: always the configured one, independent of the API's."""
    return settings.gateway.metrics_listen.host if settings.gateway.metrics_listen else "127.0.0.1"


def overrides(
    settings: Config, host: str, ports: Ports, node_key: str | None = None, *, is_host_named: bool = False
) -> dict[str, str]:
    """Settings that override any file and the shell's environment: the requested ports, and the local node. `node_key`
    is a key of the local node, if it needs one. `is_host_named`: the user named `host` on the command line."""
    environment = {
        "CORTEX_GATEWAY__LISTEN": run_files.address(host, ports.gateway),
        "CORTEX_GATEWAY__METRICS_LISTEN": run_files.address(metrics_host(settings), ports.metrics),
        "NEURON_LISTEN": run_files.address("127.0.0.1", ports.neuron),
        "NEURON_PORT": str(ports.neuron),
    }
    if is_host_named and not Listen(run_files.address(host, ports.gateway)).is_loopback:
        environment["CORTEX_GATEWAY__OPEN_UNTIL_KEYS"] = "true"
    if ports.ollama is not None:
        environment["CORTEX_GATEWAY__OLLAMA_LISTEN"] = run_files.address(host, ports.ollama)
    endpoints = [urlsplit(neuron.endpoint) for neuron in settings.neurons]
    found = (i for i, e in enumerate(endpoints) if e.hostname in _LOOPBACK and e.port == ports.neuron)
    index = next(found, len(endpoints))
    if index == len(endpoints):
        taken = {neuron.name for neuron in settings.neurons}
        name = next(name for name in (run_files.LOCAL_NODE, *map("local-{}".format, range(2, 99))) if name not in taken)
        environment[f"CORTEX_NEURONS__{index}__NAME"] = name
        environment[f"CORTEX_NEURONS__{index}__ENDPOINT"] = f"http://127.0.0.1:{ports.neuron}"
    if node_key is not None:
        environment[NODE_KEY_VARIABLE] = node_key
        environment[f"CORTEX_NEURONS__{index}__KEY_ENV"] = NODE_KEY_VARIABLE
    return environment


def reachable(host: str) -> str:
    """The address at which a client on this machine reaches a listener on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
