"""A database that fails: what cannot be served without it says so, with a status that clients repeat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cortex.gateway.config import ActivitySection
from cortex.gateway.database import Database, StoreError
from cortex.gateway.ledger.keys import generate

if TYPE_CHECKING:
    from .fake_neuron import StartNeuron
    from .started_gateway import StartGateway


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
