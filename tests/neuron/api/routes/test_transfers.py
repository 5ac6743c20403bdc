"""Listings of shared files that take long, because the files are read for their digests."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Server
from cortex.http.ticker import Ticker
from cortex.neuron.api import responses
from cortex.neuron.api.calls import ApiCall
from cortex.neuron.api.routes.transfers import SharedFiles
from cortex.neuron.hub_process.neighbours import NeighbourFailed, Transfer
from cortex.wire.errors import ModelNotFound
from cortex.wire.node.neighbours import Neighbour, SharedRepository

from ....waiting import WAIT_S, until

FOUND = SharedRepository(commit="0" * 40, files=())


class SlowFiles:
    """Its listing ends when `may_end` is set."""

    def __init__(self, *, fails: bool) -> None:
        self.may_end = asyncio.Event()
        self.files = self
        self._fails = fails

    async def shared(self, repository: str, revision: str) -> SharedRepository:
        assert (repository, revision) == ("files-of-nodes/m", "main")
        await self.may_end.wait()
        if self._fails:
            raise ModelNotFound("gone")
        return FOUND


@pytest.mark.parametrize("fails", [False, True])
async def test_client_of_a_long_listing_gets_spaces_before_it(*, fails: bool) -> None:
    files: Any = SlowFiles(fails=fails)
    shared = SharedFiles(files, None, quiet_s=0.01)
    tasks: list[asyncio.Task[Any]] = []

    def handle(exchange: Exchange) -> None:
        call = ApiCall(exchange, {"repository": "files-of-nodes/m"})
        tasks.append(asyncio.create_task(shared.list(call)))
        exchange.on_disconnect(tasks[0].cancel)
        tasks[0].add_done_callback(lambda task: exchange.abort() if task.exception() is not None else None)

    server = Server(handle, responses.rejection, Ticker(asyncio.get_running_loop()))
    _, port = await server.listen("127.0.0.1", 0)
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    def read() -> bytes:
        with Transfer(Neighbour(name="a", url=f"http://127.0.0.1:{port}")) as transfer:
            transfer.open("GET", "/")
            first = transfer.read(2)
            loop.call_soon_threadsafe(started.set)
            return first + transfer.read(1 << 20)

    reading = asyncio.create_task(asyncio.to_thread(read))
    async with asyncio.timeout(WAIT_S):
        await started.wait()
    files.may_end.set()
    if fails:
        with pytest.raises(NeighbourFailed):
            await reading
    else:
        body = await reading
        assert body.startswith(b"  ")
        assert msgspec.json.decode(body, type=SharedRepository) == FOUND
    await until(lambda: tasks[0].done())
    await server.close(0.0)
