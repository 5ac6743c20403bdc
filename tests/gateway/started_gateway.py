"""A gateway under test, in this process or as a program, and how a test talks to it."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import ClientSession

from cortex.gateway.server import Gateway

from ..waiting import WAIT_S, until_response


class Client:
    """A gateway under test and an HTTP client for it."""

    def __init__(self, gateway: Gateway, port: int, session: ClientSession) -> None:
        self.gateway = gateway
        self.port = port
        self.session = session

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path, headers=headers) as response:
            return response.status, msgspec.json.decode(await response.read())

    async def get_until(self, path: str, holds: Callable[[Any], object], **headers: str) -> Any:
        """The body of the first response that `holds`."""

        async def ask() -> Any:
            return (await self.get(path, **headers))[1]

        return await until_response(ask, holds)

    async def post(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes | None) else msgspec.json.encode(body)
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            return response.status, msgspec.json.decode(await response.read())

    async def chat(self, model: str, **fields: Any) -> tuple[int, Any]:
        messages = [{"role": "user", "content": "hello"}]
        return await self.post("/v1/chat/completions", {"model": model, "messages": messages, **fields})

    async def stream(self, path: str, body: Any) -> bytes:
        async with self.session.post(self.url + path, data=msgspec.json.encode(body)) as response:
            assert response.status == 200, await response.text()
            return await response.read()

    def metrics(self) -> str:
        return self.gateway.metrics.exposition().decode()


class Process:
    """A gateway as its own process."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, metrics_port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.metrics_port = metrics_port
        self.log_file = log

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    async def get(self, path: str, port: int | None = None) -> bytes:
        url = f"http://127.0.0.1:{port or self.port}{path}"
        return await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=WAIT_S).read())


StartGateway = Callable[..., Awaitable[Client]]
"""`(*nodes, **settings)`: starts a gateway over fake nodes in this process."""
SpawnGateway = Callable[..., Awaitable[Process]]
"""`(node, extra, listen_host, port, num_files)`: starts a gateway as a program."""
