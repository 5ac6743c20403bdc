"""Real gateways over fake nodes, on real sockets."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, ClientTimeout

from cortex.fleet.catalogue import Catalogue
from cortex.fleet.rules import EvictionRules
from cortex.fleet.sleeping import WakeRules
from cortex.gateway.batches.runner import BatchLimits
from cortex.gateway.config import (
    ActivitySection,
    BatchesSection,
    Config,
    GatewaySection,
    NeuronSection,
    PicturesSection,
    ResponsesSection,
)
from cortex.gateway.ledger.groups import GroupSection
from cortex.gateway.ledger.keys import KeySection
from cortex.gateway.ledger.store import LedgerSection
from cortex.gateway.ledger.users import SignInSection
from cortex.gateway.pictures import PictureFetcher
from cortex.gateway.proxy.services import RequestLimits
from cortex.gateway.server import Gateway
from cortex.settings import Listen
from cortex.telemetry.tracing import TelemetrySection

from ..ports import free_port
from ..waiting import WAIT_S, until
from .fake_neuron import JSON, FakeNeuron, StartNeuron
from .postgres_server import database, postgres_url
from .started_gateway import Client, Process, SpawnGateway, StartGateway

__all__ = ["database", "postgres_url"]


@pytest.fixture
async def start_gateway(tmp_path: Path) -> AsyncIterator[StartGateway]:
    """Starts gateways over fake nodes and closes them when the test ends; fast polls, no eviction delays."""
    opened: list[Gateway] = []
    async with ClientSession(headers=JSON, timeout=ClientTimeout(total=WAIT_S)) as session:

        async def start(
            *nodes: FakeNeuron,
            foreign: tuple[FakeNeuron, ...] = (),
            foreign_options: Mapping[str, Any] | None = None,
            catalogue: Catalogue | None = None,
            rules: EvictionRules | None = None,
            keys: tuple[KeySection, ...] = (),
            groups: tuple[GroupSection, ...] = (),
            sign_in: SignInSection | None = None,
            key_env: str | None = None,
            node_keys: Mapping[str, str] | None = None,
            memory_mb: int | None = None,
            wakes: Mapping[str, WakeRules] | None = None,
            telemetry: TelemetrySection | None = None,
            responses: ResponsesSection | None = None,
            batches: BatchesSection | None = None,
            activity: ActivitySection | None = None,
            ledger: LedgerSection | None = None,
            pictures: PicturesSection | None = None,
            fetcher: PictureFetcher | None = None,
            clock: Callable[[], float] = time.monotonic,
            request_limits: RequestLimits | None = None,
            batch_limits: BatchLimits | None = None,
            **gateway: Any,
        ) -> Client:
            sections = [
                NeuronSection(
                    name=node.name,
                    endpoint=node.endpoint,
                    key_env=(node_keys or {}).get(node.name),
                    memory_mb=memory_mb,
                    wake=(wakes or {}).get(node.name),
                )
                for node in nodes
            ]
            sections += [
                NeuronSection(
                    name=node.name, endpoint=node.endpoint, kind="openai", key_env=key_env, **(foreign_options or {})
                )
                for node in foreign
            ]
            defaults: dict[str, Any] = {"listen": Listen("127.0.0.1:0"), "poll_interval_s": 0.05, "poll_timeout_s": 5}
            section = GatewaySection(metrics_listen=None, **(defaults | gateway))
            config = Config(
                gateway=section,
                neurons=tuple(sections),
                keys=keys,
                groups=groups,
                sign_in=sign_in or SignInSection(),
                eviction=rules or EvictionRules(min_residency_s=0),
                telemetry=telemetry or TelemetrySection(),
                responses=responses or ResponsesSection(),
                batches=batches or BatchesSection(),
                activity=activity or ActivitySection(),
                ledger=ledger or LedgerSection(),
                pictures=pictures or PicturesSection(),
            )
            started = Gateway(
                config,
                catalogue or Catalogue(),
                tmp_path,
                fetcher=fetcher,
                clock=clock,
                request_limits=request_limits,
                batch_limits=batch_limits,
            )
            _, port = await started.start()
            opened.append(started)
            return Client(started, port, session)

        yield start
    for gateway in opened:
        await gateway.close()


@pytest.fixture
async def neurons() -> AsyncIterator[StartNeuron]:
    """Starts fake nodes and stops them when the test ends."""
    started: list[FakeNeuron] = []

    async def start(name: str, **attributes: Any) -> FakeNeuron:
        node = FakeNeuron(name, **attributes)
        await node.start()
        started.append(node)
        return node

    yield start
    for node in started:
        node.control_gate.set()
        await node.stop()


@pytest.fixture
async def spawn(tmp_path: Path) -> AsyncIterator[SpawnGateway]:
    """Starts gateways as programs of their own and kills them when the test ends."""
    started: list[asyncio.subprocess.Process] = []

    async def start(
        node: FakeNeuron | None = None,
        extra: str = "",
        listen_host: str = "127.0.0.1",
        port: int | None = None,
        num_files: int | None = None,
    ) -> Process:
        port, metrics_port = port or free_port(), free_port()
        config = tmp_path / "cortex.toml"
        text = f'[gateway]\nlisten = "{listen_host}:{port}"\nmetrics_listen = "127.0.0.1:{metrics_port}"\n{extra}\n'
        if node is not None:
            text += f'[[neurons]]\nname = "{node.name}"\nendpoint = "{node.endpoint}"\n'
        config.write_text(text)
        log = tmp_path / "log"
        process = await asyncio.create_subprocess_exec(
            *(() if num_files is None else ("sh", "-c", f'ulimit -n {num_files} && exec "$0" "$@"')),
            *(sys.executable, "-m", "cortex.gateway", "--config", str(config)),
            stderr=log.open("w"),
            env=os.environ,
        )
        started.append(process)
        running = Process(process, port, metrics_port, log)
        await until(lambda: "listens" in running.log or process.returncode is not None)
        return running

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
            await process.wait()
