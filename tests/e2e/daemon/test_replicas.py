"""Extra replicas behind a gateway: demand adds one, and it gives way to the load of another model. No request fails."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from .conftest import TIMEOUT_S, nodes_of, until

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Daemon, StartDaemon, StartGateway

pytestmark = pytest.mark.e2e

WIDE, OTHER, NODE = "wide", "other", "node"


class Clients:
    """Clients of the gateway, each with one request after another until they are stopped."""

    def __init__(self, gateway: Daemon, count: int) -> None:
        self.statuses: Counter[Any] = Counter()
        self._gateway = gateway
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(count)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)

    def _ask(self, number: int) -> None:
        body = {"model": WIDE, "prompt": f"{number}", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        while not self._stopped.is_set():
            status, response = self._gateway.call("/v1/completions", body, TIMEOUT_S)
            self.statuses[status if status == 200 else str(response)] += 1


def test_demand_through_a_gateway_adds_a_replica_that_gives_way_to_another_model(
    start_daemon: StartDaemon, start_gateway: StartGateway, wide_model: Path
) -> None:
    node = start_daemon(
        "cpu_devices = 2",
        "drain_s = 60.0",
        # Its weights take 60 MB, so there is room for two of these models and not for three.
        "limits = { max_num_seqs = 1, add_replica_after_s = 0.2, memory_mb = 170 }",
        f'[[models]]\nid = "{WIDE}"\nsource = "{wide_model}"\nmax_replicas = 2',
        f'[[models]]\nid = "{OTHER}"\nsource = "{wide_model}"',
        loads_demo=False,
    )
    gateway = start_gateway("", {NODE: node})

    def wide() -> dict[str, Any]:
        return next(model for model in nodes_of(gateway)[NODE]["models"] if model["id"] == WIDE)

    with Clients(gateway, 4) as clients:
        until(lambda: wide()["replicas"] == 2, "no replica was added")
        until(lambda: wide()["load"]["running"] == 2, "only one replica has requests")  # each has one slot
        devices = gateway.call(f"/v1/models/{WIDE}")[1]["locations"][0]["replica_devices"]
        assert sorted(devices) == [[0], [1]]
        status, response = gateway.call("/v1/completions", {"model": OTHER, "prompt": "x", "max_tokens": 2}, TIMEOUT_S)
        assert status == 200, response
        assert node.model(WIDE)["replicas"] == 1
        num_served = clients.statuses[200]
        until(lambda: clients.statuses[200] > num_served + 4, "no responses after the replica was unloaded")
        assert gateway.call(f"/fleet/models/{OTHER}/unload", {}, TIMEOUT_S)[0] in (200, 202)
        until(lambda: wide()["replicas"] == 2, "no replica was added after the other model had gone")
    assert set(clients.statuses) == {200}
