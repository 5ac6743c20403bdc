"""Two nodes that share models, in one process: the real engine and workers, connections through queues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from faulty_models import parts

from cortex.neuron.config import Limits, ModelEntry, NeuronConfig, PeerEntry
from cortex.neuron.node.node import Node
from cortex.neuron.node.spanning.protocol import PeerUnreachable
from cortex.neuron.worker.factory import WorkerFactory
from cortex.wire.errors import InsufficientCapacity, LoadFailed, Recovering
from cortex.wire.node.orders import LoadRequest, UnloadRequest
from cortex.wire.node.protocol import ModelState

from ....waiting import NEVER_S, WAIT_S
from ...generations import Reader
from ..node_calls import converse, generate, greedy_request, load, tokens_of, until, worker_of, write_source

BOTH = ("first", "second")


class End:
    """One end of a connection."""

    local_host = "127.0.0.1"

    def __init__(self) -> None:
        self.other: End = self
        self.received: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (message := await self.received.get()) is not None:
            yield message

    async def send(self, message: bytes) -> None:
        self.other.received.put_nowait(message)

    async def close(self) -> None:
        for end in (self, self.other):
            end.received.put_nowait(None)


class Nodes:
    """`first` leads."""

    first: Node
    second: Node

    def __init__(self) -> None:
        self.ends: list[End] = []
        self._served: list[asyncio.Task[None]] = []

    async def connect(self, peer: PeerEntry) -> End:
        if self.second.health().status == "draining":
            raise PeerUnreachable("it shuts down")
        near, far = End(), End()
        near.other, far.other = far, near
        self.ends.append(near)
        self._served.append(asyncio.create_task(self.second.host_share(far)))
        return near


@pytest.fixture
def peer_sleep_mb() -> int:
    return 256


@pytest_asyncio.fixture(loop_scope="session")
async def nodes(tmp_path: Path, workers: WorkerFactory, peer_sleep_mb: int) -> AsyncIterator[Nodes]:
    source = write_source(tmp_path / "model", seed=1, num_key_value_heads=4, num_hidden_layers=4)
    other = write_source(tmp_path / "other", seed=1)  # the same name for other files

    def entry(
        model_id: str,
        *,
        source: str = source,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        replicas: int = 1,
        nodes: tuple[str, ...] = BOTH,
        devices: tuple[int, ...] = (),
    ) -> ModelEntry:
        return ModelEntry(
            id=model_id,
            source=source,
            context_tokens=512,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            replicas=replicas,
            nodes=nodes,
            devices=devices,
        )

    led = (
        entry("whole", nodes=()),
        entry("two", tensor_parallel=2, devices=(0,)),
        entry("two too", tensor_parallel=2, devices=(1,)),
        entry("staged too", pipeline_parallel=2, devices=(1,)),
        entry("anywhere", tensor_parallel=2),
        entry("four", tensor_parallel=4),
        entry("different", tensor_parallel=2),
        entry("staged", pipeline_parallel=2, devices=(0,)),
        entry("four stages", pipeline_parallel=4),
        entry("local", tensor_parallel=2, nodes=()),
        entry("odd", tensor_parallel=3),
        entry("copies", tensor_parallel=2, replicas=2, nodes=()),
    )
    held = (
        entry("different", source=other, nodes=()),
        entry("local", tensor_parallel=2, nodes=()),
    )
    nodes = Nodes()

    def config(models: tuple[ModelEntry, ...], *peers: PeerEntry, sleep_mb: int = 256) -> NeuronConfig:
        limits = Limits(max_num_seqs=8, sleep_mb=sleep_mb)
        return NeuronConfig(
            models=models, peers=peers, limits=limits, drain_s=NEVER_S, cpu_devices=2, model_roots=(tmp_path,)
        )

    peer = PeerEntry(name="second", endpoint="http://second:1")
    changes = {
        "make_workers": lambda: workers,
        "connect_peer": nodes.connect,
    }
    nodes.second = await Node.start(config(held, sleep_mb=peer_sleep_mb), parts(**changes))
    nodes.first = await Node.start(config(led, peer), parts(**changes))
    yield nodes
    await nodes.first.close()
    await nodes.second.close()


async def test_several_devices_of_each_node_and_nothing_is_left_after_the_unload(nodes: Nodes) -> None:
    await load(nodes.first, "whole")
    status = await load(nodes.first, "four")
    assert (status.devices, status.num_devices, status.nodes) == ((0, 1), 2, BOTH)
    (share,) = nodes.second.health().shares
    assert (share.model_id, share.lead, share.state, share.devices) == ("four", "first", "ready", (0, 1))
    assert await generate(nodes.first, "four") == await generate(nodes.first, "whole")
    # Each node counts what its own devices hold.
    assert (len(status.device_bytes), sum(status.device_bytes)) == (2, status.measured_bytes)
    assert share.num_bytes > 0
    assert (await nodes.first.unload(UnloadRequest(model_id="four"))).state is ModelState.COLD
    assert nodes.second.health().shares == ()


async def test_layers_are_divided_among_the_devices_of_both_nodes(nodes: Nodes) -> None:
    await load(nodes.first, "whole")
    expected = await generate(nodes.first, "whole")
    for model, devices in (("staged", 1), ("four stages", 2)):
        status = await load(nodes.first, model)
        assert (status.num_devices, status.nodes, len(status.devices)) == (devices, BOTH, devices)
        assert len(nodes.second.health().shares[0].devices) == devices
        assert await generate(nodes.first, model) == expected
        await nodes.first.unload(UnloadRequest(model_id=model))
        assert nodes.second.health().shares == ()


async def test_layers_and_cache_stay_below_the_limit_of_each_node(nodes: Nodes) -> None:
    async def parts(*limits: int | None) -> tuple[int, tuple[int, ...]]:
        request = LoadRequest(model_id="staged", max_bytes_of_nodes=limits)
        status = await nodes.first.load(request, wait=True)
        (share,) = nodes.second.health().shares
        await nodes.first.unload(UnloadRequest(model_id="staged"))
        return share.awake_bytes, (*status.stage_layers, *share.stage_layers)

    free_bytes, free_layers = await parts()
    limit_bytes = free_bytes // 2
    taken_bytes, layers = await parts(None, limit_bytes)
    assert 0 < taken_bytes <= limit_bytes
    assert sum(layers) == sum(free_layers) == 4
    with pytest.raises(LoadFailed, match="max_bytes_of_nodes for each of them, or for none"):
        await parts(limit_bytes)


@pytest.mark.parametrize("model", ["four", "four stages"])
async def test_model_sleeps_and_wakes_on_all_nodes(nodes: Nodes, model: str) -> None:
    await load(nodes.first, model)
    tokens, cached = await converse(nodes.first, model, "first")
    assert cached == 0
    for turn in range(2):
        assert (await nodes.first.unload(UnloadRequest(model_id=model, sleep=True))).state is ModelState.ASLEEP
        (share,) = nodes.second.health().shares
        assert (share.state, share.devices) == ("asleep", (0, 1))
        assert share.host_bytes > 0
        assert (await load(nodes.first, model)).state is ModelState.READY
        assert nodes.second.health().shares[0].state == "ready"
        assert await converse(nodes.first, model, f"turn {turn}") == (tokens, 192), "all ranks kept their part"
    assert all(device.kv_host_bytes for node in (nodes.first, nodes.second) for device in node.health().devices)
    await nodes.first.unload(UnloadRequest(model_id=model, sleep=True))
    assert (await nodes.first.unload(UnloadRequest(model_id=model))).state is ModelState.COLD
    assert nodes.second.health().shares == ()


async def test_devices_of_a_sleeping_model_are_free_for_others_until_it_wakes(nodes: Nodes) -> None:
    await load(nodes.first, "four")
    await nodes.first.unload(UnloadRequest(model_id="four", sleep=True))
    await load(nodes.second, "local")
    with pytest.raises(InsufficientCapacity, match=r"on node second: its devices have a part of local"):
        await load(nodes.first, "four")
    assert nodes.first.model("four").state is ModelState.ASLEEP
    assert nodes.first.devices.claims.conflicts(spans=True) == {}
    await nodes.second.unload(UnloadRequest(model_id="local"))
    assert (await load(nodes.first, "four")).state is ModelState.READY


@pytest.mark.parametrize("model", ["two", "staged"])
async def test_sleeping_part_whose_device_was_taken_is_loaded_on_another_device_of_its_node(
    nodes: Nodes, model: str
) -> None:
    await load(nodes.first, model)
    tokens = await generate(nodes.first, model)
    await nodes.first.unload(UnloadRequest(model_id=model, sleep=True))
    workers = [worker_of(node) for node in (nodes.first, nodes.second)]
    await load(nodes.first, f"{model} too")
    devices = {share.model_id: share.devices for share in nodes.second.health().shares}
    assert devices[model] == devices[f"{model} too"]
    assert (await load(nodes.first, model)).state is ModelState.READY
    held = {share.model_id: (share.state, share.devices) for share in nodes.second.health().shares}
    assert held == {f"{model} too": ("ready", devices[model]), model: ("ready", (1 - devices[model][0],))}
    assert await generate(nodes.first, model) == tokens == await generate(nodes.first, f"{model} too")
    assert [worker_of(node) for node in (nodes.first, nodes.second)] == workers


async def test_sleeping_part_of_the_lead_whose_device_was_taken_is_loaded_on_another_one(nodes: Nodes) -> None:
    (device,) = (await load(nodes.first, "anywhere")).devices
    tokens = await generate(nodes.first, "anywhere")
    await nodes.first.unload(UnloadRequest(model_id="anywhere", sleep=True))
    other = ("two", "two too")[device]
    assert (await load(nodes.first, other)).devices == (device,)
    assert (await load(nodes.first, "anywhere")).devices == (1 - device,)
    assert await generate(nodes.first, "anywhere") == tokens == await generate(nodes.first, other)


@pytest.mark.parametrize("peer_sleep_mb", [0])
async def test_model_is_unloaded_if_a_peer_has_no_room_for_its_sleep(nodes: Nodes) -> None:
    await load(nodes.first, "two")
    assert (await nodes.first.unload(UnloadRequest(model_id="two", sleep=True))).state is ModelState.COLD
    assert nodes.second.health().shares == ()


async def test_connection_that_is_lost_during_the_sleep_frees_both_sides(nodes: Nodes) -> None:
    await load(nodes.first, "two")
    await nodes.first.unload(UnloadRequest(model_id="two", sleep=True))
    await nodes.ends[-1].close()
    await until(lambda: nodes.first.model("two").state is ModelState.COLD)
    await until(lambda: nodes.second.health().shares == ())
    assert (await load(nodes.first, "two")).state is ModelState.READY


async def test_devices_are_not_shared_with_another_divided_model(nodes: Nodes) -> None:
    await load(nodes.first, "two")
    with pytest.raises(InsufficientCapacity, match=r"device 0 .*: it has a part of two, which spans nodes"):
        await load(nodes.first, "local")
    with pytest.raises(InsufficientCapacity, match="it has a part of two, which spans nodes"):
        await load(nodes.second, "local")
    await nodes.first.unload(UnloadRequest(model_id="two"))
    await load(nodes.second, "local")
    with pytest.raises(
        InsufficientCapacity, match=r"on node second: .* it has a part of local, and a model that spans"
    ):
        await load(nodes.first, "two")
    await nodes.second.unload(UnloadRequest(model_id="local"))
    assert (await load(nodes.first, "two")).state is ModelState.READY


@pytest.mark.parametrize(
    ("model", "names", "message"),
    [
        ("different", (), "on node second: the files of different here are not those of the lead"),
        ("odd", (), "3 devices, which 2 nodes cannot share equally"),
        ("local", ("first", "third"), r"this node has no peer third \(it has second\); add it to \[\[peers\]\]"),
        ("copies", BOTH, "has both `nodes` and replicas = 2"),
        ("local", ("first",), "name two or more, each once, this one first"),
    ],
)
async def test_what_cannot_span_nodes_is_rejected_with_the_reason_and_leaves_nothing(
    nodes: Nodes, model: str, names: tuple[str, ...], message: str
) -> None:
    with pytest.raises(LoadFailed, match=message):
        await nodes.first.load(LoadRequest(model_id=model, nodes=names), wait=True)
    await until(lambda: nodes.second.health().shares == ())
    assert nodes.first.devices.claims.conflicts(spans=True) == {}
    assert nodes.second.devices.claims.conflicts(spans=True) == {}


async def test_unload_during_the_load_leaves_nothing(nodes: Nodes) -> None:
    phases = (
        lambda: True,
        lambda: nodes.ends,  # the nodes are connected
        lambda: any(share.devices for share in nodes.second.health().shares),  # the part is being loaded
    )
    for reached in phases:
        nodes.ends.clear()
        loading = asyncio.create_task(load(nodes.first, "two"))
        await asyncio.sleep(0)
        await until(reached)
        assert (await nodes.first.unload(UnloadRequest(model_id="two"))).state is ModelState.COLD
        with pytest.raises(LoadFailed):
            await loading
        await until(lambda: nodes.second.health().shares == ())
        assert nodes.first.devices.claims.conflicts(spans=True) == {}
    assert (await load(nodes.first, "two")).state is ModelState.READY


async def test_peer_that_shuts_down_lets_requests_end_and_replaces_no_worker(nodes: Nodes) -> None:
    await load(nodes.first, "two")
    expected = await generate(nodes.first, "two", max_tokens=100)
    process = worker_of(nodes.first)
    running = Reader(nodes.first.generate("two", greedy_request("running", max_tokens=100)))
    first = await anext(aiter(running))
    ending = asyncio.create_task(nodes.second.close())

    async def keep_asking() -> None:
        while True:
            nodes.first.generate("two", greedy_request("late", max_tokens=1)).cancel()
            await asyncio.sleep(0.01)

    with pytest.raises(Recovering, match="node second shuts down"):
        await keep_asking()
    tokens = [token for output in first for token in output.tokens] + await tokens_of(running)
    assert tokens == expected
    async with asyncio.timeout(WAIT_S):
        await ending
    await until(lambda: nodes.first.model("two").state is ModelState.RECOVERING)
    assert worker_of(nodes.first) == process


async def test_lost_connection_frees_both_sides_and_the_model_comes_back(nodes: Nodes) -> None:
    await load(nodes.first, "two")
    tokens = await generate(nodes.first, "two")
    await nodes.ends[-1].close()
    await until(lambda: nodes.first.model("two").state is ModelState.RECOVERING)
    assert (await load(nodes.first, "two")).state is ModelState.READY
    assert await generate(nodes.first, "two") == tokens
    assert len(nodes.second.health().shares) == 1
