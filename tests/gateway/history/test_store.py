"""The history outlives a restart where there is a database, and is for operators."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from cortex.gateway.config import Config
from cortex.gateway.database import Database, Execute
from cortex.gateway.dispatch.event_log import EventLog
from cortex.gateway.history import SCHEMA, HistoryStore
from cortex.gateway.ledger.keys import NewKey, generate
from cortex.gateway.proxy.accounting.activity import ActivityLog
from cortex.wire.node.protocol import ModelState

from ...waiting import until
from ..fake_neuron import GB

if TYPE_CHECKING:
    from ..fake_neuron import StartNeuron
    from ..started_gateway import StartGateway


def bearer(key: NewKey) -> dict[str, str]:
    return {"Authorization": f"Bearer {key.text}"}


async def test_history_has_requests_loads_and_memory_and_outlives_a_restart(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB, "b": GB}, states={"a": ModelState.READY})
    beast.first_token_s = 0.0  # at once: more would exceed a response that takes less than that
    admin, user = generate("admin", operator=True), generate("user")
    keys = (admin.section, user.section)
    client = await start_gateway(beast, keys=keys)
    for model in ("a", "b"):  # one is loaded for its request
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
        assert (await client.post("/v1/chat/completions", body, **bearer(user)))[0] == 200
    _, listed = await client.get("/fleet/activity", **bearer(user))
    assert all(request["ttft_s"] > 0 and request["tokens_per_s"] > 0 for request in listed["requests"])
    status, found = await client.get("/fleet/history?window=hour", **bearer(admin))
    assert status == 200
    assert (len(found["times"]), found["step_s"]) == (360, 10)
    assert (sum(found["requests"]), sum(found["loads"]), sum(found["evictions"])) == (2, 1, 0)
    assert sum(found["completion_tokens_per_s"]) * 10 == 6
    assert any(found["first_token_p50_s"]), "whole responses have a first token, too"
    history = client.gateway._history.history  # noqa: SLF001 - the next step would be ten seconds away
    history._memory_at = 0.0  # noqa: SLF001
    await until(lambda: history.memory.since(0.0))
    await client.gateway.close()

    again = await start_gateway(beast, keys=keys)
    for window in ("hour", "day"):
        _, found = await again.get(f"/fleet/history?window={window}", **bearer(admin))
        assert (sum(found["requests"]), sum(found["loads"])) == (2, 1)
    (device,) = found["devices"]
    assert (device["node"], device["device"]) == ("beast", 0)
    assert set(device["changes"][-1]["models"]) == {"a", "b"}
    assert (await again.get("/fleet/history", **bearer(user)))[0] == 403
    assert (await again.get("/fleet/history?window=year", **bearer(admin)))[0] == 400


async def test_old_entries_of_former_gateways_are_deleted(tmp_path: Path) -> None:
    database = Database(Config().database(tmp_path)).use(SCHEMA)
    now = time.time()
    ages_s = [("hour", 100), ("hour", 4_000), ("day", 4_000), ("day", 90_000), ("memory 0 n", 90_000)]

    def fill(execute: Execute) -> None:
        for kind, age_s in ages_s:
            execute("INSERT INTO history VALUES ($1, $2, $3, $4)", ("former:1", kind, now - age_s, "{}"))

    database.run(fill)
    store = HistoryStore(ActivityLog(Config().activity), EventLog(), database, 1)
    await store.save()
    rows = database.run(lambda execute: list(execute("SELECT kind, at FROM history WHERE gateway = 'former:1'", ())))
    await database.close()
    assert sorted((kind, round(now - at)) for kind, at in rows) == [("day", 4_000), ("hour", 100)]
