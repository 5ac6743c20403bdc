"""A database that fails, and a PostgreSQL server that accepts connections and responds to nothing: what cannot be
served without it says so, with a status that clients repeat.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cortex.gateway.config import ActivitySection
from cortex.gateway.database import Database, StoreError
from cortex.gateway.ledger.keys import generate
from cortex.gateway.ledger.ledger import UNWRITTEN_FILE
from cortex.gateway.ledger.store import LedgerSection, open_store, read_usage
from cortex.wire.node.protocol import ModelState

from ..waiting import WAIT_S
from .fake_neuron import GB
from .postgres_server import frozen

if TYPE_CHECKING:
    from .fake_neuron import StartNeuron
    from .started_gateway import StartGateway

if TYPE_CHECKING:
    from .fake_neuron import StartNeuron
    from .started_gateway import StartGateway


AWAY = "the database cannot be used; usage and pins are kept in memory"


async def test_routes_that_need_the_database_are_unavailable_while_it_fails(
    neurons: StartNeuron, start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = generate("olga", operator=True)
    client = await start_gateway(
        await neurons("beast"), keys=(key.section,), activity=ActivitySection(log_retention_days=1)
    )
    routes = ("/fleet/usage", "/fleet/usage.csv", "/fleet/activity?since=1", "/fleet/audit", "/v1/responses/resp_1")
    bearer = {"authorization": f"Bearer {key.text}"}
    statuses = {route: (await client.get(route, **bearer))[0] for route in routes if not route.endswith("csv")}
    assert 503 not in statuses.values()

    def fail(*_: Any) -> None:
        raise StoreError("away")

    monkeypatch.setattr(Database, "run", fail)
    for route in routes:
        status, body = await client.get(route, **bearer)
        assert (status, body["error"]["code"]) == (503, "database_unavailable"), route


async def test_a_frozen_server_degrades_health_and_neither_delays_the_end_nor_loses_usage(
    neurons: StartNeuron,
    start_gateway: StartGateway,
    postgres_url: str,
    tmp_path: Path,
) -> None:
    key = generate("frozen")
    node = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY})
    ledger = LedgerSection(database=postgres_url, flush_s=0.1)
    client = await start_gateway(node, keys=(key.section,), ledger=ledger)
    bearer = {"authorization": f"Bearer {key.text}"}
    body = {"model": "a", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    with frozen(postgres_url):
        client.gateway.database.work_s = 0.5
        status, _ = await client.post("/v1/chat/completions", body, **bearer)
        assert status == 200, "requests are served meanwhile"
        health = await client.get_until("/health", lambda health: AWAY in health["reasons"], **bearer)
        assert health["status"] == "degraded"
        async with asyncio.timeout(WAIT_S):
            await client.gateway.close()
        assert (tmp_path / UNWRITTEN_FILE).exists()
    restarted = await start_gateway(node, keys=(key.section,), ledger=ledger)
    assert not (tmp_path / UNWRITTEN_FILE).exists()
    await restarted.gateway.close()
    store = open_store(postgres_url)
    (spend,) = [
        each
        for each in store.run(lambda execute: read_usage(execute, "key", since=0, until=2**40))
        if each.group_name == "frozen"
    ]
    store.close_connection()
    assert spend.counts.requests == 1
    assert spend.counts.tokens > 0
