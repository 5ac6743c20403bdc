"""The configuration files that `cortex up` writes for its two programs. The text is made by pure functions."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cortex.cli.up.sources import ModelSource
from cortex.system.cache_folder import cache_folder

LOCAL_NODE = "local"
DRAIN_S = 1.5
"""Ctrl-C at a terminal waits for nearly complete responses, not for long ones."""

_HEADER = "# Written by `cortex up` at every start; changes are lost. Use your own file with --config.\n"


@dataclass(frozen=True, slots=True)
class Ports:
    gateway: int
    metrics: int
    neuron: int
    ollama: int | None = None
    """A second port of the gateway's API."""


def run_directory(port: int, environment: Mapping[str, str] = os.environ) -> Path:
    """The folder for configuration and logs of the `cortex up` that listens on `port`."""
    return cache_folder(environment) / "run" / str(port)


def _text(value: str) -> str:
    """A TOML basic string; JSON's escapes are a subset of TOML's, once DEL is escaped too."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def address(host: str, port: int) -> str:
    """`host:port` as the configuration expects it; IPv6 hosts in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def gateway_config(host: str, ports: Ports) -> str:
    """`cortex.toml` of a gateway with the local neuron as its only node."""
    return f"""{_HEADER}
[gateway]
listen = {_text(address(host, ports.gateway))}
metrics_listen = {_text(address("127.0.0.1", ports.metrics))}
models = "models.toml"
drain_s = {DRAIN_S}
poll_interval_s = 0.25

[[neurons]]
name = {_text(LOCAL_NODE)}
endpoint = {_text(f"http://127.0.0.1:{ports.neuron}")}
"""


def catalogue(models: Sequence[ModelSource]) -> str:
    """`models.toml`: the models of the command line, so that the gateway can load them again after an eviction."""
    entries = [f"[[models]]\nid = {_text(model.id)}\n{_files_of(model)}" for model in models]
    return "\n".join([_HEADER, *entries])


def neuron_config(ports: Ports, models: Sequence[ModelSource]) -> str:
    """`neuron.toml`: loopback only, with the models of the command line loaded at start."""
    entries = [f"[[default_models]]\nid = {_text(model.id)}\n{_files_of(model)}" for model in models]
    head = f"{_HEADER}\nlisten = {_text(address('127.0.0.1', ports.neuron))}\ndrain_s = {DRAIN_S}\n"
    return "\n".join([head, *entries])


def _files_of(model: ModelSource) -> str:
    quant = f"quant = {_text(model.quant)}\n" if model.quant is not None else ""
    sampling = f"sampling = {{ temperature = {model.temperature} }}\n" if model.temperature is not None else ""
    return f"source = {_text(model.source)}\n{quant}{sampling}"


def write(folder: Path, files: dict[str, str]) -> None:
    """Write `files` into `folder`, which is created when absent."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
