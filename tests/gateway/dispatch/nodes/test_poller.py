"""A poller goes on after failures, and notices a frozen node within the time that the settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.gateway.dispatch.nodes.poller import pause_after
from cortex.wire.node.protocol import ModelState

from ....waiting import until
from ...fake_neuron import GB

if TYPE_CHECKING:
    from ...fake_neuron import StartNeuron
    from ...started_gateway import StartGateway


async def test_poller_goes_on_after_an_unexpected_failure(
    neurons: StartNeuron, start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY})
    client = await start_gateway(beast)
    decode, broken = msgspec.json.decode, [True]

    def failing_decode(data: bytes, **options: Any) -> Any:
        if broken[0]:
            raise RuntimeError("a bug")
        return decode(data, **options)

    monkeypatch.setattr("cortex.gateway.dispatch.nodes.client.msgspec.json.decode", failing_decode)
    await until(lambda: not client.gateway.dispatcher.is_ready("a", "beast"))
    await until(lambda: client.gateway.tasks.failing)
    broken[0] = False
    assert (await client.get("/health"))[1]["status"] == "degraded"
    assert (await client.get("/health"))[1]["failing_tasks"] == ["poll beast"]
    await until(lambda: client.gateway.dispatcher.is_ready("a", "beast"))
    assert 'cortex_task_restarts_total{task="poll beast"}' in client.metrics()


@pytest.mark.parametrize(
    ("took_s", "responded", "pause_s"), [(0.0, True, 1.0), (2.0, True, 1.0), (0.25, False, 0.75), (2.0, False, 0.0)]
)
def test_time_of_a_failed_poll_counts_towards_the_interval(took_s: float, responded: bool, pause_s: float) -> None:
    assert pause_after(1.0, took_s, responded=responded) == pause_s


async def test_servers_of_a_reloaded_node_are_known_at_once(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB})
    catalogue = Catalogue(models=(ModelSpec(id="a", harness="fresh"),))
    client = await start_gateway(beast, catalogue=catalogue)
    assert (await client.chat("a"))[0] == 507
    beast.harnesses, beast.num_reloads = ("torch", "fresh"), 1
    await until(lambda: "fresh" in client.gateway.dispatcher.fleet.nodes[0].harnesses)
    assert (await client.chat("a"))[0] == 200
