"""A group on GPUs sleeps and wakes as one: two nodes with a card each, and a stand-in for vLLM."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from faulty_models import running_node

from cortex.fleet.catalogue import ModelSpec
from cortex.neuron.node.node import Node
from cortex.neuron.worker.discovery import DeviceReading, Inventory
from cortex.wire.node.protocol import Device, ModelState

from .....waiting import WAIT_S, until
from ....api.served import served
from .commands import through_gateway

MIB = 1 << 20
STAND_IN = Path(__file__).parents[4] / "e2e" / "daemon" / "group_server.py"


class Card:
    """The GPU of one member: what its server holds depends on the state that the leader's was asked for."""

    def __init__(self, rank: int, program: Path, state: Path) -> None:
        self._device = Device(index=0, kind="cuda", name="a card", total_bytes=4000 * MIB, uuid=f"GPU-{rank}")
        self._rank, self._program, self._state = rank, program, state

    def inventory(self) -> Inventory:
        return Inventory((self._device,), readings=self.readings())

    def readings(self, _: object = None) -> dict[int, DeviceReading]:
        held = 0
        if self._rank in self.processes():
            sleeps = self._state.exists() and self._state.read_text().startswith("/sleep")
            held = (10 if sleeps else 400) * MIB
        return {0: DeviceReading(self._device.total_bytes, self._device.total_bytes - held)}

    def processes(self) -> dict[int, int]:
        """The servers by their ranks."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                arguments = (entry / "cmdline").read_text().split("\0")
                if str(self._program) in arguments[:3] and "--node-rank" in arguments:
                    found[int(arguments[arguments.index("--node-rank") + 1])] = int(entry.name)
        return found


def members(nodes: list[Node]) -> list[tuple[ModelState, int]]:
    """The state of each, and the MiB that it holds on its card."""
    found = [node.model("m") for node in nodes]
    return [(status.state, (status.measured_bytes or 0) // MIB) for status in found]


async def test_group_sleeps_and_wakes_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, state, model = tmp_path / "vllm", tmp_path / "state", tmp_path / "model"
    program.write_text(f"#!{sys.executable} -IS\n" + STAND_IN.read_text())
    program.chmod(0o755)
    model.mkdir()
    (model / "weights").write_bytes(bytes(1000))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    nodes, urls = list[Node](), list[str]()
    async with AsyncExitStack() as opened:
        for rank in range(2):
            card = Card(rank, program, state)
            settings: dict[str, Any] = {
                "cluster_address": f"127.0.0.{rank + 1}",
                "model_roots": [str(tmp_path)],
                "harnesses": [{"name": "vllm", "env": {"STAND_IN_STATE": str(state)}}],
                "limits": {"sleep_mb": 2000},
                "harness": {"torch": {"hf_cache": str(tmp_path / f"hub-{rank}")}},
            }
            running = running_node(tmp_path, settings, discover=card.inventory, read_devices=card.readings)
            nodes.append(await opened.enter_async_context(running))
            host, port = await opened.enter_async_context(served(nodes[-1]))
            urls.append(f"http://{host}:{port}")
        spec = ModelSpec(id="m", source=str(model), harness="vllm", nodes=("box", "second"), vram_mb=1000)
        gateway = await opened.enter_async_context(through_gateway(urls[0], tmp_path, models=(spec,), second=urls[1]))
        timeout = aiohttp.ClientTimeout(total=WAIT_S)
        session = await opened.enter_async_context(aiohttp.ClientSession(gateway, timeout=timeout))

        async def ask() -> int:
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
            async with session.post("/v1/chat/completions", json=body) as response:
                return response.status

        async def put_to_sleep() -> None:
            async with session.post("/fleet/models/m/unload", json={"sleep": True, "wait": True}) as response:
                assert response.status == 200, await response.text()
            await until(lambda: [state for state, _ in members(nodes)] == [ModelState.ASLEEP] * 2)

        assert await ask() == 200
        await until(lambda: members(nodes) == [(ModelState.READY, 400)] * 2)
        before = card.processes()
        await put_to_sleep()
        assert await ask() == 200
        assert [state for state, _ in members(nodes)] == [ModelState.READY] * 2
        assert card.processes() == before, "it was woken, not started again"
        await put_to_sleep()
        os.kill(before[1], signal.SIGKILL)  # a member that sleeps
        await until(lambda: not card.processes())
        assert await ask() == 200
        assert [state for state, _ in members(nodes)] == [ModelState.READY] * 2
    assert not card.processes()
