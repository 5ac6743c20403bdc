"""KV blocks between nodes: only what is whole, of the same model and worth it."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import struct
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from cortex.neuron.engine.host_pages import block_files
from cortex.neuron.engine.host_pages.block_files import DamagedFile, Selection
from cortex.neuron.engine.host_pages.rates import CopyRate
from cortex.neuron.engine.host_pages.store import BlockKind, ChosenBlocks
from cortex.neuron.engine.kv.pages import ROOT, Digest, page_digests
from cortex.neuron.engine.request import EngineInfo, EngineRequest, EngineStats
from cortex.neuron.engine.roofline.step_work import StepWork
from cortex.neuron.node.memory.kv_exchange import MAX_FETCHES, ExchangeRules, KvExchange
from cortex.neuron.worker.protocol import Command, ExpectBlocks, FindBlocks
from cortex.neuron.worker.supervisor import WorkerSupervisor
from cortex.wire.node.kv_blocks import PAGES, PATH, BlocksRequest
from cortex.wire.node.neighbours import Neighbour

from ....waiting import NEVER_S, WAIT_S, until

MODEL = bytes(range(16))
KIND = BlockKind(MODEL, 0, 4096)
PROMPT = tuple(range(1024))
DIGESTS = tuple(page_digests(ROOT, PROMPT, 32))
INFO = EngineInfo("f", "d", 4096, 100, 1, 1, 32, 128, work=StepWork(1, weights_per_token=1), kv_name=MODEL.hex())
SLOW = EngineStats(prompt_token_s=1.0)
REQUEST = EngineRequest("r", PROMPT, 1)


class Worker(WorkerSupervisor):
    """It has `num_pages` of every prompt, and writes what it is asked for at the second time."""

    def __init__(self, num_pages: int = 0) -> None:
        self.sent: list[Command] = []
        self.saves: list[tuple[Digest, ...]] = []
        self.forgotten: list[tuple[str | None, tuple[bytes, ...]]] = []
        self._num_pages = num_pages

    async def save_blocks(self, model: bytes, digests: tuple[Digest, ...]) -> bool:
        assert model == MODEL
        self.saves.append(digests)
        return len(self.saves) % 2 == 0

    async def count_pages(self, model: bytes, digests: tuple[Digest, ...]) -> int:
        assert model == MODEL
        return min(self._num_pages, len(digests))

    async def forget_blocks(self, model_id: str | None, tenants: tuple[bytes, ...]) -> None:
        self.forgotten.append((model_id, tenants))

    def send(self, command: Command) -> None:
        self.sent.append(command)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in block_files.scan(folder, MODEL, {}))


def announced(worker: Worker) -> list[str]:
    """The files that it was told of, each once, without a look at the others."""
    assert all(isinstance(each, FindBlocks) and each.model == MODEL and each.files for each in worker.sent)
    return sorted(name for each in worker.sent if isinstance(each, FindBlocks) for name in each.files)


def fill(folder: Path, count: int = 32) -> None:
    for first in range(0, count, 10):
        digests = list(reversed(DIGESTS[first : min(count, first + 10)]))
        blocks = [memoryview(digest.ljust(4096)) for digest in digests]
        block_files.write_file(folder, KIND, "m", digests, blocks)


def select(folder: Path, digests: Sequence[Digest]) -> Selection:
    return block_files.select(block_files.scan(folder, MODEL, {}).values(), digests)


def stream(selection: Selection) -> bytes:
    parts = []
    for piece in selection.pieces:
        if piece.path is None:
            parts.append(piece.data)
        else:
            parts.append(piece.path.read_bytes()[piece.first_byte : piece.first_byte + piece.num_bytes])
    return b"".join(parts)


@asynccontextmanager
async def node_with(
    body: bytes, num_pages: int, seen: list[BlocksRequest], *, pause: bool = False
) -> AsyncIterator[Neighbour]:
    async def send(request: web.Request) -> web.StreamResponse:
        assert request.headers["authorization"] == "Bearer t"
        seen.append(msgspec.json.decode(await request.read(), type=BlocksRequest))
        if not pause:
            return web.Response(body=body, headers={PAGES: str(num_pages)})
        response = web.StreamResponse(headers={PAGES: str(num_pages), "content-length": str(len(body))})
        await response.prepare(request)
        await response.write(body[:100])
        await asyncio.sleep(NEVER_S)
        return response

    app = web.Application()
    app.router.add_post(PATH, send)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]  # noqa: SLF001
    try:
        yield Neighbour(name="a", url=f"http://127.0.0.1:{port}", ticket="t")
    finally:
        await runner.cleanup()


def test_stream_of_blocks_makes_the_same_files_elsewhere(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    found = select(tmp_path / "a", DIGESTS[:25])
    assert found.num_pages == 25
    data = stream(found)
    assert len(data) == found.num_bytes
    assert block_files.receive(io.BytesIO(data).readinto, tmp_path / "b", MODEL, "m", DIGESTS) == 25 * 4096
    again = select(tmp_path / "b", DIGESTS)
    assert again.num_pages == 25
    for file in block_files.scan(tmp_path / "b", MODEL, {}).values():
        view = memoryview(bytearray(len(file.digests) * 4096))
        assert block_files.read_blocks(file, 0, view)
        assert bytes(view[:24]) == file.digests[0]


@pytest.mark.parametrize("damage", ["flip", "cut", "model", "noise", "unasked"])
def test_altered_truncated_or_foreign_stream_is_rejected(tmp_path: Path, damage: str) -> None:
    fill(tmp_path / "a")
    data = bytearray(stream(select(tmp_path / "a", DIGESTS)))
    model, wanted = MODEL, DIGESTS[:31] if damage == "unasked" else DIGESTS
    if damage == "flip":
        data[-1] ^= 1
    elif damage == "cut":
        del data[-1:]
    elif damage == "model":
        model = bytes(16)
    elif damage == "noise":
        data[:] = b"x" * 100
    with pytest.raises(DamagedFile):
        block_files.receive(io.BytesIO(bytes(data)).readinto, tmp_path / "b", model, "m", wanted)
    for file in block_files.scan(tmp_path / "b", MODEL, {}).values():
        assert block_files.read_blocks(file, 0, memoryview(bytearray(len(file.digests) * 4096)))


async def test_fetches_what_it_lacks_and_tells_its_workers(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    writers, seen = [Worker(10), Worker(3)], list[BlocksRequest]()
    exchange = KvExchange(tmp_path / "b", 1 << 30, writers)
    body = stream(select(tmp_path / "a", DIGESTS[10:]))
    async with node_with(body, 22, seen) as source:
        assert await exchange.fetch("m", INFO, SLOW, REQUEST, source) == 22 * 4096
        assert [len(each.digests) for each in seen] == [22]
        assert writers[1].sent.pop(0) == FindBlocks(MODEL), "it looks for what the other one has"
        assert [announced(each) for each in writers] == [names(tmp_path / "b")] * 2
        assert [len(each.sent) for each in writers] == [1, 1]
        whole = KvExchange(tmp_path / "b", 1 << 30, [Worker(32)])
        assert await whole.fetch("m", INFO, SLOW, REQUEST, source) == 0, "it has all of it now"
        assert len(seen) == 1
    assert select(tmp_path / "b", DIGESTS[10:]).num_pages == 22


async def test_blocks_that_arrive_while_the_prompt_is_computed_are_reported_one_file_after_another(
    tmp_path: Path,
) -> None:
    fill(tmp_path / "a")
    worker, seen = Worker(), list[BlocksRequest]()
    exchange = KvExchange(tmp_path / "b", 1 << 30, [worker])
    files = block_files.scan(tmp_path / "a", MODEL, {}).values()
    body = stream(block_files.select(files, DIGESTS, last_first=True))
    fast = EngineStats(prompt_token_s=1e-3)
    async with node_with(body, 32, seen) as source:
        info = replace(INFO, computes_fronts=True)
        assert await exchange.fetch("m", info, fast, REQUEST, source) == 32 * 4096
    assert seen[0].last_first
    begun, *found, ended = worker.sent
    assert (begun, ended) == (ExpectBlocks("r"), ExpectBlocks("r", has_ended=True))
    assert len(found) == len(files)
    worker.sent = found
    assert announced(worker) == names(tmp_path / "b")
    exchange.close()


@pytest.mark.parametrize(
    ("bytes_per_s", "prompt_token_s", "computes_fronts", "is_fetched"),
    [
        pytest.param(None, 0.1, True, True, id="nothing waits while the link is measured"),
        pytest.param(None, 1e-6, False, False, id="assumed to be slower than computing"),
        pytest.param(1e3, 1.0, False, True, id="131 s instead of 1,024 s"),
        pytest.param(1e3, 0.1, False, False, id="131 s instead of 102 s"),
        pytest.param(1e3, 0.1, True, True, id="half of it while the other half is computed"),
        pytest.param(1e2, 0.1, True, False, id="a small part of it"),
    ],
)
async def test_fetches_what_is_expected_to_save_time(
    tmp_path: Path, bytes_per_s: float | None, prompt_token_s: float, *, computes_fronts: bool, is_fetched: bool
) -> None:
    fill(tmp_path / "a")
    rates: dict[str, CopyRate] = {}
    exchange = KvExchange(tmp_path / "b", 1 << 30, [], rates=rates)
    info, stats = replace(INFO, computes_fronts=computes_fronts), EngineStats(prompt_token_s=prompt_token_s)
    async with node_with(stream(select(tmp_path / "a", DIGESTS)), 32, []) as source:
        rates[source.url] = CopyRate(bytes_per_s=bytes_per_s)
        assert (await exchange.fetch("m", info, stats, REQUEST, source) > 0) == is_fetched
    exchange.close()


@pytest.mark.parametrize("last_first", [False, True])
def test_blocks_are_sent_in_the_order_of_their_pages(tmp_path: Path, last_first: bool) -> None:
    fill(tmp_path)
    found = block_files.select(block_files.scan(tmp_path, MODEL, {}).values(), DIGESTS, last_first=last_first)
    pages = [
        min(DIGESTS.index(file.digests[(piece.first_byte - file.first_byte) // 4096]) for file in [by_path[piece.path]])
        for by_path in [block_files.scan(tmp_path, MODEL, {})]
        for piece in found.pieces
        if piece.path is not None
    ]
    assert pages == sorted(pages, reverse=last_first)
    assert len(pages) > 2


@pytest.mark.parametrize(
    ("stats", "budget"),
    [
        pytest.param(EngineStats(prompt_token_s=1e-9), 1 << 30, id="computing is faster"),
        pytest.param(EngineStats(), 1 << 30, id="its speed is not known"),
        pytest.param(SLOW, 100, id="over the budget"),
    ],
)
async def test_takes_nothing_that_is_not_worth_it(tmp_path: Path, stats: EngineStats, budget: int) -> None:
    fill(tmp_path / "a")
    exchange = KvExchange(tmp_path / "b", budget, [])
    body = stream(select(tmp_path / "a", DIGESTS))
    async with node_with(body, 32, []) as source:
        assert await exchange.fetch("m", INFO, stats, REQUEST, source) == 0
        assert block_files.stored(tmp_path / "b") == []
        later = KvExchange(tmp_path / "b", 1 << 30, []) if budget == 100 else exchange
        assert await later.fetch("m", INFO, SLOW, REQUEST, source) > 0, "the node is not avoided"


async def test_source_that_is_gone_or_slow_costs_no_more_than_computing(tmp_path: Path) -> None:
    exchange = KvExchange(tmp_path / "b", 1 << 30, [], ExchangeRules(connect_s=0.05, save_s=0.05))
    async with node_with(b"", 0, []) as source:
        pass
    assert await exchange.fetch("m", INFO, SLOW, REQUEST, source) == 0
    fill(tmp_path / "a")
    body = stream(select(tmp_path / "a", DIGESTS))
    async with node_with(body, 32, [], pause=True) as source:
        assert await exchange.fetch("m", INFO, SLOW, REQUEST, source) == 0


async def test_source_that_says_nothing_is_given_up_when_computing_would_have_ended(tmp_path: Path) -> None:
    exchange = KvExchange(tmp_path / "b", 1 << 30, [], ExchangeRules(save_s=NEVER_S))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = Neighbour(name="a", url=f"http://127.0.0.1:{silent.getsockname()[1]}")
        async with asyncio.timeout(WAIT_S):
            assert await exchange.fetch("m", INFO, EngineStats(prompt_token_s=1e-4), REQUEST, source) == 0


@pytest.mark.parametrize("changes", [{"url": "http://a:port"}, {"url": "https://127.0.0.1:1", "authority": "no PEM"}])
async def test_address_or_authority_that_cannot_be_used_fails_no_request(
    tmp_path: Path, changes: dict[str, str]
) -> None:
    source = Neighbour(**{"name": "a", "url": "", **changes})
    assert await KvExchange(tmp_path, 1 << 30, []).fetch("m", INFO, SLOW, REQUEST, source) == 0


@pytest.mark.parametrize("lost", ["digests", "checksums", "part"])
async def test_header_without_a_field_fails_no_request(tmp_path: Path, lost: str) -> None:
    metadata = {"format": 1, "model": MODEL.hex(), "model_id": "m", "part": 0, "num_bytes": 1, "digests": [1]}
    metadata |= {"checksums": []}
    del metadata[lost]
    rest = json.dumps(metadata).encode()
    header = struct.pack("<8sII", b"cortexkv", len(rest), zlib.crc32(rest)) + rest
    async with node_with(header.ljust(4096, b"\0"), 32, []) as source:
        assert await KvExchange(tmp_path, 1 << 30, []).fetch("m", INFO, SLOW, REQUEST, source) == 0


async def test_what_is_fetched_stays_within_the_budget_of_the_disk(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    old = BlockKind(bytes(16), 0, 4096)
    for digest in DIGESTS[:30]:
        block_files.write_file(tmp_path / "b", old, "other", [digest], [memoryview(bytes(4096))])
    body = stream(select(tmp_path / "a", DIGESTS))
    budget = 200_000
    assert len(body) < budget < len(body) + 30 * 8192
    async with node_with(body, 32, []) as source:
        assert await KvExchange(tmp_path / "b", budget, []).fetch("m", INFO, SLOW, REQUEST, source) == 32 * 4096
    assert sum(file.num_bytes for file in block_files.stored(tmp_path / "b")) <= budget
    assert select(tmp_path / "b", DIGESTS).num_pages == 32


@pytest.mark.parametrize("computes_fronts", [False, True])
async def test_cancelled_request_ends_its_fetch(tmp_path: Path, *, computes_fronts: bool) -> None:
    fill(tmp_path / "a")
    body, seen = stream(select(tmp_path / "a", DIGESTS)), list[BlocksRequest]()
    worker = Worker()
    exchange = KvExchange(tmp_path / "b", 1 << 30, [worker])
    async with node_with(body, 32, seen, pause=True) as source:
        info = replace(INFO, computes_fronts=computes_fronts)
        fetching = asyncio.create_task(exchange.fetch("m", info, SLOW, REQUEST, source))
        await until(lambda: seen)
        assert worker.sent == [ExpectBlocks("r")] * computes_fronts
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
    assert worker.sent == [ExpectBlocks("r"), ExpectBlocks("r", has_ended=True)][: 2 * computes_fronts]


async def test_workers_expect_no_blocks_of_a_transfer_that_failed_or_did_not_begin(tmp_path: Path) -> None:
    worker, info = Worker(), replace(INFO, computes_fronts=True)
    exchange = KvExchange(tmp_path / "b", 1 << 30, [worker])
    nowhere = Neighbour(name="a", url="http://127.0.0.1:9", ticket="t")
    assert await exchange.fetch("m", info, SLOW, REQUEST, nowhere) == 0
    assert worker.sent == [ExpectBlocks("r"), ExpectBlocks("r", has_ended=True)]
    assert await exchange.fetch("m", info, SLOW, REQUEST, nowhere) == 0
    assert len(worker.sent) == 2, "a node that failed is not asked"
    exchange.close()


async def test_offers_what_is_on_disk_and_writes_the_rest_first(tmp_path: Path) -> None:
    fill(tmp_path, 20)
    worker = Worker()
    exchange = KvExchange(tmp_path, 1 << 30, [worker])
    assert (await exchange.offered(BlocksRequest(MODEL, DIGESTS[:20]))).num_pages == 20
    assert worker.saves == []
    assert (await exchange.offered(BlocksRequest(MODEL, DIGESTS))).num_pages == 20
    assert worker.saves == [DIGESTS, DIGESTS], "it is asked until it has written all"
    assert (await KvExchange(tmp_path, 0, [worker]).offered(BlocksRequest(MODEL, DIGESTS))).num_pages == 0


async def test_node_that_cannot_be_reached_is_not_asked_again_soon(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    body, seen = stream(select(tmp_path / "a", DIGESTS)), list[BlocksRequest]()
    exchange = KvExchange(tmp_path / "b", 1 << 30, [])
    async with node_with(body[:-1], 32, seen) as source:
        assert await exchange.fetch("m", INFO, SLOW, REQUEST, source) == 0
        assert await exchange.fetch("m", INFO, SLOW, REQUEST, source) == 0
        assert len(seen) == 1
        later = KvExchange(tmp_path / "c", 1 << 30, [], ExchangeRules(avoid_s=0.0))
        for number in (2, 3):
            assert await later.fetch("m", INFO, SLOW, REQUEST, source) == 0
            assert len(seen) == number


async def test_more_fetches_than_run_at_once_wait_no_longer_than_computing(tmp_path: Path) -> None:
    exchange = KvExchange(tmp_path / "b", 1 << 30, [], ExchangeRules(save_s=NEVER_S))
    stats = EngineStats(prompt_token_s=1e-4)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = Neighbour(name="a", url=f"http://127.0.0.1:{silent.getsockname()[1]}")
        async with asyncio.timeout(WAIT_S):
            fetches = (exchange.fetch("m", INFO, stats, REQUEST, source) for _ in range(3 * MAX_FETCHES))
            assert await asyncio.gather(*fetches) == [0] * (3 * MAX_FETCHES)


async def test_forgets_files_and_what_workers_have(tmp_path: Path) -> None:
    fill(tmp_path)
    worker = Worker()
    exchange = KvExchange(tmp_path, 1 << 30, [worker])
    assert await exchange.forget(ChosenBlocks("other")) == (0, 0)
    assert (await exchange.forget(ChosenBlocks(), 60.0))[0] == 0
    assert worker.forgotten == [("other", ())], "what is in memory has no age"
    assert (await exchange.forget(ChosenBlocks("m", (DIGESTS[0][:8],))))[0] == 4
    assert worker.forgotten[1:] == [("m", (DIGESTS[0][:8],))]
    assert block_files.stored(tmp_path) == []


SHARED = EngineRequest("r", PROMPT, 1)


@pytest.mark.parametrize(
    ("theirs", "own", "is_shared"),
    [
        pytest.param(32, 0, True, id="all of it"),
        pytest.param(32, 8, True, id="the rest of it"),
        pytest.param(32, 20, False, id="a short rest is computed"),
        pytest.param(0, 0, False, id="there is nothing"),
        pytest.param(8, 32, False, id="the other one has more"),
    ],
)
async def test_device_reads_what_another_one_of_its_node_has_computed(
    tmp_path: Path, theirs: int, own: int, *, is_shared: bool
) -> None:
    source, target = Worker(theirs), Worker(own)
    exchange = KvExchange(tmp_path, 1 << 30, [source, target])
    await exchange.share(INFO, SLOW, SHARED, source, target)
    assert source.saves == ([DIGESTS[:theirs]] * 2 if is_shared else []), "asked until they are written"
    assert target.sent == ([FindBlocks(MODEL)] if is_shared else [])
    exchange.close()


@pytest.mark.parametrize(
    ("stats", "budget_bytes", "request_"),
    [
        pytest.param(EngineStats(prompt_token_s=1e-9), 1 << 30, SHARED, id="computing is faster"),
        pytest.param(SLOW, 0, SHARED, id="no disk"),
        pytest.param(SLOW, 1 << 30, EngineRequest("r", PROMPT, 1, uses_prefix_cache=False), id="not cached"),
        pytest.param(SLOW, 1 << 30, EngineRequest("r", PROMPT, 1, prompt_logprobs=0), id="every token is scored"),
    ],
)
async def test_devices_of_a_node_share_only_what_saves_time(
    tmp_path: Path, stats: EngineStats, budget_bytes: int, request_: EngineRequest
) -> None:
    source, target = Worker(32), Worker()
    exchange = KvExchange(tmp_path, budget_bytes, [source, target])
    await exchange.share(INFO, stats, request_, source, target)
    assert (source.saves, target.sent) == ([], [])
    exchange.close()


async def test_device_whose_blocks_are_not_written_in_time_is_not_waited_for(tmp_path: Path) -> None:
    class Busy(Worker):
        async def save_blocks(self, model: bytes, digests: tuple[Digest, ...]) -> bool:
            await super().save_blocks(model, digests)
            return False

    source, target = Busy(32), Worker()
    exchange = KvExchange(tmp_path, 1 << 30, [source, target])
    await exchange.share(INFO, EngineStats(prompt_token_s=1e-4), SHARED, source, target)
    assert source.saves
    assert not target.sent
    exchange.close()
