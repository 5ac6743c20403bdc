"""Models that the fake server runs, and its processes."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.fleet.rules import EvictionRules
from cortex.gateway.config import Config, GatewaySection, NeuronSection
from cortex.gateway.ledger.keys import KeySection
from cortex.gateway.server import Gateway
from cortex.neuron.node.harness.command import guard
from cortex.neuron.node.harness.command.server_process import descendants
from cortex.settings import Listen


@dataclass(frozen=True)
class NotedSizes:
    """Acts as a `SizeOfModel`."""

    all: list[int] = field(default_factory=list)
    least: int = 0

    def started(self, num_bytes: int) -> int:
        self.all.append(num_bytes)
        return self.holds(num_bytes)

    def holds(self, num_bytes: int) -> int:
        return max(num_bytes, self.least)

    def ran(self, num_bytes: int) -> None:
        self.all.append(num_bytes)


SERVER = str(Path(__file__).with_name("fake_server.py"))
START = (sys.executable, "-S", SERVER, "--port", "${PORT}")


def config(*arguments: str, model: dict[str, Any] | None = None, **entry: Any) -> dict[str, Any]:
    harness = {"name": "fake", "cmd": [*START, *arguments], "memory_mb": 16, **entry}
    return {"harnesses": [harness], "models": [{"id": "m", "harness": "fake", **(model or {})}]}


@asynccontextmanager
async def through_gateway(
    node_url: str, tmp_path: Path, *keys: KeySection, models: tuple[ModelSpec, ...] = (), **others: str
) -> AsyncIterator[str]:
    """The URL of a gateway over one node, and `others` by their names."""
    settings = Config(
        gateway=GatewaySection(listen=Listen("127.0.0.1:0"), metrics_listen=None, poll_interval_s=0.05),
        neurons=tuple(NeuronSection(name=name, endpoint=url) for name, url in {"box": node_url, **others}.items()),
        eviction=EvictionRules(min_residency_s=0),
        keys=keys,
    )
    (tmp_path / "gateway").mkdir()
    gateway = Gateway(settings, Catalogue(models=models), tmp_path / "gateway")
    _, port = await gateway.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await gateway.close()


def servers() -> list[int]:
    """The processes below this one that run the fake server."""
    return [process for process in descendants(os.getpid()) if _runs_server(process)]


def _runs_server(process: int) -> bool:
    try:
        command = Path(f"/proc/{process}/cmdline").read_text()
    except OSError:  # it has ended meanwhile
        return False
    return SERVER in command and guard.__file__ not in command
