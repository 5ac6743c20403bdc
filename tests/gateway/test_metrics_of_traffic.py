"""Every metric has its labels and the right numbers after real traffic."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import uvloop
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from cortex.fleet.catalogue import Catalogue
from cortex.gateway.config import Config
from cortex.gateway.ledger.keys import generate
from cortex.gateway.metrics import OVERHEAD_BUCKETS
from cortex.gateway.server import Gateway
from cortex.parsing import envelope as envelopes
from cortex.parsing.envelope import RelayedBody
from cortex.wire.node import usage_report
from cortex.wire.node.protocol import DeviceHealth, ModelLoad, ModelState

from ..waiting import until
from .fake_neuron import GB, plain_response
from .fake_responses import REPORTED, begin_stream, chunk

if TYPE_CHECKING:
    from .fake_neuron import FakeNeuron, StartNeuron
    from .started_gateway import Client, StartGateway


READY = ModelState.READY
LOAD_S = 16.0
MODEL = {"node": "beast", "model": "a"}
SPEND = {"key": "alice", "model": "a"}
DEVICE = {"node": "beast", "device": "0"}


class PausingNode:
    """Its streams pause once the client has their first token; `/v1/messages` streams in the Anthropic dialect."""

    def __init__(self) -> None:
        self.client_has_token = asyncio.Event()

    async def respond(self, node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not body.get("stream"):
            return await plain_response(node, request, body)
        response = await begin_stream(request)
        anthropic = request.path == "/v1/messages"
        first = (
            b'event: message_start\ndata: {"type":"message_start"}\n\n' if anthropic else chunk("a", {"content": "x"})
        )
        await response.write(b": node\n\n" + first)
        await self.client_has_token.wait()
        self.client_has_token.clear()
        await asyncio.sleep(0.05)
        await response.write(b"data: [DONE]\n\n" + usage_report.comment(REPORTED))
        return response


class Clock:
    """The gateway's clock, which a test can stop and set."""

    def __init__(self) -> None:
        self.stopped_at: float | None = None

    def monotonic(self) -> float:
        return time.monotonic() if self.stopped_at is None else self.stopped_at


Samples = dict[str, list[tuple[dict[str, str], float]]]
"""Name → labels and value of each sample."""
Measured = tuple["Client", "FakeNeuron", "asyncio.Task[tuple[int, Any]]"]


def scraped(client: Client) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(client.metrics()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value(found: Samples, name: str, labels: dict[str, str]) -> float:
    values = [number for have, number in found[name] if have == labels]
    assert len(values) == 1, (name, labels, found[name])
    return values[0]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def measured(
    neurons: StartNeuron, start_gateway: StartGateway, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Measured]:
    """A gateway after responses, streams, an error, a cold start that evicts, and with a request that waits since its
    clock was stopped."""
    key = generate("alice")
    beast = await neurons("beast", sizes={"a": GB, "b": 20 * GB, "c": 20 * GB}, states={"a": READY, "b": READY})
    pausing = PausingNode()
    beast.respond = pausing.respond
    beast.loads["a"] = ModelLoad(running=2, waiting=1, kv_used_fraction=0.25)
    plain = beast.health
    device = DeviceHealth(
        index=0, total_bytes=24 * GB, free_bytes=3 * GB, utilisation=0.5, temperature_c=61.0, worker="running"
    )
    monkeypatch.setattr(beast, "health", lambda: msgspec.structs.replace(plain(), devices=(device,)))
    client = await start_gateway(beast, keys=(key.section,), clock=clock.monotonic)
    headers = {"Authorization": f"Bearer {key.text}"}
    body = {"model": "a", "messages": [], "max_tokens": 5}
    for path in ("/v1/chat/completions", "/v1/messages"):
        assert (await client.post(path, body, **headers))[0] == 200
        async with client.session.post(client.url + path, json=body | {"stream": True}, headers=headers) as response:
            received = b""
            while b"data:" not in received:
                received += await response.content.readany()
            pausing.client_has_token.set()
            await response.read()
    assert (await client.post("/v1/chat/completions", body | {"model": "nobody"}, **headers))[0] == 404
    beast.load_gate = asyncio.Event()
    clock.stopped_at = time.monotonic()
    waiting = asyncio.create_task(client.post("/v1/chat/completions", body | {"model": "c"}, **headers))
    await until(lambda: client.gateway.dispatcher.queue_depths.get("c") == 1 and beast.load_requests)
    yield client, beast, waiting
    if not waiting.done():
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting


async def test_counters_and_histograms_of_requests(measured: Measured) -> None:
    client, _, _ = measured
    found = scraped(client)
    assert value(found, "cortex_requests_total", MODEL) == 4
    assert value(found, "cortex_request_errors_total", {"model": "", "node": "", "code": "model_not_found"}) == 1
    assert value(found, "cortex_request_duration_seconds_count", MODEL) == 4
    assert value(found, "cortex_request_duration_seconds_sum", MODEL) > 0.1
    assert value(found, "cortex_request_duration_seconds_bucket", MODEL | {"le": "+Inf"}) == 4
    assert value(found, "cortex_time_to_first_token_seconds_count", MODEL) == 2, "one stream in each dialect"
    assert value(found, "cortex_time_to_first_token_seconds_bucket", MODEL | {"le": "300.0"}) == 2
    assert value(found, "cortex_tokens_per_second_count", MODEL) == 2
    assert 0 < value(found, "cortex_tokens_per_second_sum", MODEL) / 2 < 2 / 0.04, "0.05 s, on a clock that is inexact"
    assert value(found, "cortex_prompt_tokens_total", SPEND) == 4 * REPORTED.prompt_tokens
    assert value(found, "cortex_completion_tokens_total", SPEND) == 4 * REPORTED.completion_tokens
    assert value(found, "cortex_cached_prompt_tokens_total", SPEND) == 4 * REPORTED.cached_tokens
    assert value(found, "cortex_overhead_seconds_count", {}) == 4


async def test_gauges_of_nodes_devices_and_models(measured: Measured) -> None:
    client, _, _ = measured
    found = scraped(client)
    assert value(found, "cortex_node_up", {"node": "beast"}) == 1
    assert value(found, "cortex_queue_depth", {"model": "c"}) == 1
    assert value(found, "cortex_queue_depth", {"model": "a"}) == 0
    assert value(found, "cortex_device_memory_total_bytes", DEVICE) == 24 * GB
    assert value(found, "cortex_device_memory_free_bytes", DEVICE) == 3 * GB
    assert value(found, "cortex_device_utilisation_ratio", DEVICE) == 0.5
    assert value(found, "cortex_device_temperature_celsius", DEVICE) == 61
    assert value(found, "cortex_model_loaded", MODEL) == 1
    assert value(found, "cortex_model_memory_bytes", MODEL) == GB
    assert value(found, "cortex_model_running_requests", MODEL) == 2
    assert value(found, "cortex_model_waiting_requests", MODEL) == 1
    assert value(found, "cortex_model_kv_used_ratio", MODEL) == 0.25


async def test_waiting_for_a_load_does_not_count_as_overhead(measured: Measured, clock: Clock) -> None:
    client, beast, waiting = measured
    assert clock.stopped_at is not None
    clock.stopped_at += LOAD_S
    overhead_before_s = value(scraped(client), "cortex_overhead_seconds_sum", {})
    beast.load_gate.set()
    assert (await waiting)[0] == 200
    found = scraped(client)
    assert value(found, "cortex_evictions_total", {"node": "beast", "model": "b"}) == 1
    assert value(found, "cortex_cold_starts_total", {"node": "beast", "model": "c"}) == 1
    cold = {"node": "beast", "model": "c"}
    for name in ("load_duration", "request_duration"):
        assert value(found, f"cortex_{name}_seconds_sum", cold) == pytest.approx(LOAD_S)
    overhead_s = value(found, "cortex_overhead_seconds_sum", {}) - overhead_before_s
    assert overhead_s == pytest.approx(0.0, abs=1e-6), "waiting is not overhead"
    assert value(found, "cortex_queue_depth", {"model": "c"}) == 0


def test_requests_are_measured_with_a_clock_finer_than_the_smallest_bucket(tmp_path: Path) -> None:
    async def shortest_difference_s() -> float:
        """Within one turn of the loop that gateways run on."""
        clock = Gateway(Config(), Catalogue(), tmp_path)._services.clock  # noqa: SLF001
        readings = [clock() for _ in range(100_000)]
        return min((later - earlier for earlier, later in pairwise(readings) if later > earlier), default=math.inf)

    assert uvloop.run(shortest_difference_s()) < OVERHEAD_BUCKETS[0]


async def test_overhead_begins_with_the_last_byte_of_the_body(
    neurons: StartNeuron, start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast)
    read = envelopes.read_relayed

    def read_slowly(*arguments: Any, **options: Any) -> RelayedBody:
        time.sleep(0.3)
        return read(*arguments, **options)

    monkeypatch.setattr(envelopes, "read_relayed", read_slowly)
    assert (await client.chat("a"))[0] == 200
    assert value(scraped(client), "cortex_overhead_seconds_sum", {}) >= 0.3
