"""A real gateway over nodes that a test directs, on a thread of its own: the browser's driver needs the main one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from aiohttp import ClientSession, web
from multidict import CIMultiDict

from cortex.gateway.configuration_files import ConfigurationFiles
from cortex.gateway.ledger.keys import KeySection, as_toml
from cortex.gateway.server import Gateway
from cortex.settings import Listen
from cortex.wire.events import Usage
from cortex.wire.node import usage_report
from cortex.wire.node.protocol import (
    Device,
    DeviceHealth,
    Discovery,
    DiskUse,
    Health,
    HostHealth,
    ModelLoad,
    ModelState,
    ModelStatus,
    Progress,
)

from ..gateway.fake_neuron import GB, FakeNeuron
from ..gateway.fake_responses import REPORTED, begin_stream, chunk
from ..ports import free_port
from ..waiting import WAIT_S, until_response

T = TypeVar("T")
_HOP_HEADERS = ("connection", "transfer-encoding", "date")
REPLY = [
    {"role": "assistant", "content": ""},
    {"reasoning_content": "The user wants a list. "},
    {"reasoning_content": "I should keep it short."},
    {"content": "Here is **what** I found:\n\n"},
    {"content": "- one\n- two\n\n```python\nfor number in range(3):\n    print(number)\n```\n"},
]


@dataclass
class DirectedNode(FakeNeuron):
    """A node whose devices, models and responses a test sets."""

    device_names: tuple[str, ...] = ("NVIDIA RTX 3090",)
    foreign_bytes: int = 0
    places: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The devices of each model; the first one where absent."""
    parts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """What a model has on each of them, in bytes; equal parts where absent."""
    replicas: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    """The devices of each replica of a model; one on all its devices where absent."""
    extra_replica_bytes: dict[int, int] = field(default_factory=dict)
    """What extra replicas hold, by device."""
    members: tuple[ModelStatus, ...] = ()
    kv: dict[str, int] = field(default_factory=dict)
    progress: dict[str, Progress] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    temperature_c: float | None = 51.0
    utilisation: float | None = 0.37
    script: list[dict[str, Any] | asyncio.Event] = field(default_factory=lambda: list(REPLY))
    """The deltas of every streamed response. It waits at each event until the event is set."""
    first_pause_s: Callable[[], float] = lambda: 0.0
    """Before the first delta."""
    pause_s: float = 0.0
    """Between two deltas."""
    usage: Usage | Callable[[], Usage] = REPORTED
    disk: DiskUse | None = None
    ceiling_bytes: int | None = None
    """The ceiling of the first device."""
    node_ceiling_bytes: int | None = None
    host: HostHealth | None = None
    host_bytes: dict[str, int] = field(default_factory=dict)
    """Weights of loaded models in host memory."""

    def __post_init__(self) -> None:
        self.respond = _play

    def status(self, model: str) -> ModelStatus:
        status = super().status(model)
        is_placed = status.state not in (ModelState.COLD, ModelState.FAILED)
        devices = self.places.get(model, (0,)) if is_placed else ()
        return msgspec.structs.replace(
            status,
            devices=devices,
            replica_devices=self.replicas.get(model, (devices,)) if is_placed else (),
            device_bytes=self.parts.get(model, ()),
            kv_bytes=self.kv.get(model) if status.state is ModelState.READY else None,
            quant="Q4_K_M" if "gguf" in model.lower() else "BF16",
            progress=self.progress.get(model) if status.state is ModelState.LOADING else None,
            reason=self.reasons.get(model),
            disk_bytes=self.sizes[model],
            load=self.loads.get(model, ModelLoad()),
            host_bytes=self.host_bytes.get(model, status.host_bytes),
        )

    def health(self) -> Health:
        devices = tuple(
            DeviceHealth(
                index=index,
                total_bytes=self.total_bytes,
                free_bytes=self.total_bytes - self._used_bytes(index),
                worker="running",
                temperature_c=self.temperature_c,
                utilisation=self.utilisation,
                ceiling_bytes=self.ceiling_bytes if index == 0 else None,
                extra_replica_bytes=self.extra_replica_bytes.get(index, 0),
            )
            for index in range(len(self.device_names))
        )
        health = super().health()
        disk, ceiling_bytes = self.disk or health.disk, self.node_ceiling_bytes
        return msgspec.structs.replace(
            health,
            devices=devices,
            disk=disk,
            models=(*health.models, *self.members),
            ceiling_bytes=ceiling_bytes,
            host=self.host,
        )

    def _used_bytes(self, device: int) -> int:
        gone = (ModelState.COLD, ModelState.FAILED, ModelState.ASLEEP)
        placed = [model for model, state in self.states.items() if state not in gone]
        shares = [(self.places.get(model, (0,)), self.sizes[model]) for model in placed]
        ours = sum(size // len(places) for places, size in shares if device in places)
        return ours + (self.foreign_bytes if device == 0 else GB // 2)

    def discovery(self) -> Discovery:
        devices = tuple(
            Device(index=index, kind="cuda", name=name, total_bytes=self.total_bytes)
            for index, name in enumerate(self.device_names)
        )
        return msgspec.structs.replace(super().discovery(), devices=devices)


async def _play(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    assert isinstance(node, DirectedNode)
    spent = node.usage() if callable(node.usage) else node.usage
    response = await begin_stream(request)
    await asyncio.sleep(node.first_pause_s())
    for each in node.script:
        if isinstance(each, asyncio.Event):
            await each.wait()
            continue
        await response.write(chunk(body["model"], each))
        await asyncio.sleep(node.pause_s)
    await response.write(chunk(body["model"], {}, "stop"))
    usage = {
        "prompt_tokens": spent.prompt_tokens,
        "completion_tokens": spent.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": spent.cached_tokens},
    }
    last = msgspec.json.encode({"object": "chat.completion.chunk", "choices": [], "usage": usage})
    await response.write(b"data: " + last + b"\n\ndata: [DONE]\n\n" + usage_report.comment(spent))
    await response.write_eof()
    return response


class Stage:
    """Starts and stops nodes and one gateway. Its methods may be called from any thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._nodes: list[DirectedNode] = []
        self._gateway: Gateway | None = None
        self.url = f"http://127.0.0.1:{free_port()}/"

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the stage's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def add(self, node: DirectedNode) -> DirectedNode:
        """Start a node; it joins the gateway that is opened next."""
        self.call(node.start())
        self._nodes.append(node)
        return node

    def gate(self) -> asyncio.Event:
        """An event of the stage's loop, for `DirectedNode.load_gate` and `script`."""

        async def make() -> asyncio.Event:
            return asyncio.Event()

        return self.call(make())

    def open(self, event: asyncio.Event) -> None:
        self._loop.call_soon_threadsafe(event.set)

    def open_gateway(
        self, *keys: KeySection, models: str = "", extra_nodes: str = "", poll_interval_s: float = 0.2
    ) -> None:
        """Start a gateway over every node that was added. `models`: its models.toml."""
        settings = f"[gateway]\npoll_interval_s = {poll_interval_s}\n[eviction]\nmin_residency_s = 0"
        nodes = [f'[[neurons]]\nname = "{node.name}"\nendpoint = "{node.endpoint}"' for node in self._nodes]
        sections = [settings, *nodes, extra_nodes, *(as_toml(key) for key in keys)]
        (self._directory / "cortex.toml").write_text("\n".join(sections))
        (self._directory / "models.toml").write_text(models)
        self.start_gateway()

    def start_gateway(self) -> None:
        """Start the gateway on the stage's port, also after it was stopped."""

        async def start() -> None:
            files = ConfigurationFiles(self._directory / "cortex.toml", {})
            config, catalogue = files.read()
            listen = Listen(urlsplit(self.url).netloc)
            section = msgspec.structs.replace(config.gateway, listen=listen, metrics_listen=None)
            config = msgspec.structs.replace(config, gateway=section)
            self._gateway = Gateway(config, catalogue, self._directory)
            await self._gateway.start()

        self.call(start())

    def until_listed(self, model: str, is_so: Callable[[dict[str, Any]], bool]) -> None:
        """Return once the gateway's list of models has this one as it must be; it learns from polls of the nodes."""

        async def wait() -> None:
            async with ClientSession() as session:

                async def is_listed() -> bool:
                    async with session.get(f"{self.url}v1/models") as response:
                        listed = (await response.json())["data"]
                    return any(each["id"] == model and is_so(each) for each in listed)

                await until_response(is_listed)

        self.call(wait())

    def stop_gateway(self) -> None:
        if self._gateway is not None:
            self.call(self._gateway.close())
            self._gateway = None

    @contextmanager
    def proxied(self, prefix: str) -> Iterator[str]:
        """A reverse proxy that serves the gateway under `prefix` only; the URL of the page there."""

        async def forward(request: web.Request) -> web.StreamResponse:
            target = self.url + request.raw_path.removeprefix(prefix)
            headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
            async with (
                ClientSession(auto_decompress=False) as session,
                session.request(request.method, target, headers=headers, data=await request.read()) as found,
            ):
                kept = [pair for pair in found.headers.items() if pair[0].lower() not in _HOP_HEADERS]
                response = web.StreamResponse(status=found.status, headers=CIMultiDict(kept))
                await response.prepare(request)
                async for part in found.content.iter_any():
                    await response.write(part)
                return response

        async def start() -> web.AppRunner:
            app = web.Application()
            app.router.add_route("*", prefix + "{path:.*}", forward)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            return runner

        runner = self.call(start())
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}{prefix}"
        finally:
            self.call(runner.cleanup())

    def close(self) -> None:
        self.stop_gateway()
        for node in self._nodes:
            self.call(node.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
