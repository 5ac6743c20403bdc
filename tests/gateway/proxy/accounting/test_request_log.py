from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from cortex.gateway.config import ActivitySection
from cortex.gateway.database import Database, Sqlite, StoreError
from cortex.gateway.ledger.keys import generate
from cortex.gateway.proxy.accounting.activity import ActivityLog, Capture, RequestRecord
from cortex.gateway.proxy.accounting.request_log import DAY_S, LogLimits, RequestLog, SearchTooLong
from cortex.wire.events import Usage
from cortex.wire.node.protocol import ModelState

from ....waiting import WAIT_S
from ...fake_neuron import GB

if TYPE_CHECKING:
    from ...fake_neuron import StartNeuron
    from ...started_gateway import StartGateway

NOW = 1_800_000_000.0


def record(number: int, ended_at: float) -> RequestRecord:
    return RequestRecord(
        number=number,
        id=b"r%d" % number,
        ended_at=ended_at,
        key_id="abcdefgh",
        key_name="anna",
        model="m",
        node="beast",
        dialect="openai_chat",
        path=b"/v1/chat/completions",
        status=200,
        outcome="complete",
        error_code=None,
        error_message=None,
        reason="",
        usage=Usage(prompt_tokens=3),
        capture=Capture(b"secret", 6, b"secret"),
    )


async def test_keeps_requests_without_texts_until_they_are_too_old(database: str) -> None:
    now = NOW
    activity = ActivityLog(ActivitySection())
    kept = RequestLog(activity, Database(database), lambda: now)
    activity.append(record(1, NOW))
    await kept.flush()
    assert await kept.read(0, NOW + 1, 10, lambda _: True) == [], "it is off"
    kept.retention_days = 2
    for number, age_s in ((2, 3 * DAY_S), (3, 100), (4, 0)):
        activity.append(record(number, NOW - age_s))
    found = await kept.read(NOW - 5 * DAY_S, NOW + 1, 10, lambda _: True)
    assert [each.number for each in found] == [4, 3], "one is too old"
    assert {each.capture for each in found} == {None}
    assert found[0].usage == Usage(prompt_tokens=3)
    assert [each.number for each in await kept.read(NOW - 50, NOW + 1, 10, lambda _: True)] == [4]
    assert [each.number for each in await kept.read(0, NOW + 1, 1, lambda each: each.number < 4)] == [3]
    assert await kept.forget(lambda each: each.number == 3) == 1
    now += 3 * DAY_S
    await kept.flush()
    assert await kept.read(0, now, 10, lambda _: True) == []
    await kept.flush()


async def test_newest_is_first_also_within_a_millisecond(tmp_path: Path) -> None:
    activity = ActivityLog(ActivitySection())
    kept = RequestLog(activity, Database(str(tmp_path / "log.db")), lambda: NOW)
    kept.retention_days = 1
    for number, later_s in ((9, 0.0001), (10, 0.0002), (11, 0.0002), (12, 0.0)):
        activity.append(record(number, NOW + later_s))
    assert [each.number for each in await kept.read(0, NOW + 1, 10, lambda _: True)] == [11, 10, 9, 12]
    assert [each.number for each in await kept.read(0, NOW + 1, 1, lambda _: True)] == [11]
    await kept.flush()


async def test_a_cancelled_flush_loses_nothing(tmp_path: Path) -> None:
    activity, database = ActivityLog(ActivitySection()), Database(str(tmp_path / "log.db"))
    kept = RequestLog(activity, database, lambda: NOW)
    kept.retention_days = 1
    await kept.flush()  # which deletes what is too old
    is_free = threading.Event()
    earlier = database.submit(lambda: is_free.wait(WAIT_S))
    activity.append(record(1, NOW))
    flushing = asyncio.create_task(kept.flush())
    await asyncio.sleep(0)
    flushing.cancel()
    await asyncio.gather(flushing, return_exceptions=True)
    is_free.set()
    await earlier
    assert [each.number for each in await kept.read(0, NOW + 1, 10, lambda _: True)] == [1]
    await kept.flush()


async def test_waits_in_memory_while_the_database_is_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "folder").write_text("in the way")
    activity = ActivityLog(ActivitySection())
    database = Database(str(tmp_path / "folder" / "log.db"))
    kept = RequestLog(activity, database, lambda: NOW)
    kept.retention_days = 1
    activity.append(record(1, NOW))
    await kept.flush()
    await kept.flush()
    was_failing = database.is_failing
    assert was_failing
    assert caplog.text.count("the database is unavailable") == 1
    (tmp_path / "folder").unlink()
    assert [each.number for each in await kept.read(0, NOW + 1, 9, lambda _: True)] == [1]
    assert not database.is_failing
    await kept.flush()


async def test_reads_pages_of_requests_that_ended_at_the_same_time_and_those_of_one_key_alone(
    database: str,
) -> None:
    activity, opened = ActivityLog(ActivitySection()), Database(database)
    kept = RequestLog(activity, opened, lambda: NOW, LogLimits(page=2))
    kept.retention_days = 1
    for number, age_s in ((1, 9), (2, 5), (3, 5), (4, 5), (5, 5), (6, 5), (7, 1)):
        activity.append(
            replace(record(number, NOW - age_s), id=b"same", key_id="ijklmnop" if number in (3, 6) else "x")
        )
    seen: list[int] = []

    def matches(each: RequestRecord) -> bool:
        seen.append(each.number)
        return True

    found = [each.number for each in await kept.read(0, NOW + 1, 99, matches)]
    assert (found[0], sorted(found[1:6]), found[6]) == (7, [2, 3, 4, 5, 6], 1)
    assert len(found) == len(seen) == 7, "each once"
    seen.clear()
    assert len(await kept.read(0, NOW + 1, 99, matches, key_id="ijklmnop", request_id="same")) == 2
    assert sorted(seen) == [3, 6], "no others are read"
    assert await kept.read(0, NOW + 1, 99, matches, request_id="another") == []
    bounded = RequestLog(activity, opened, lambda: NOW, LogLimits(page=2, searched=4))
    assert len(await bounded.read(0, NOW + 1, 3, matches)) == 3
    with pytest.raises(SearchTooLong):
        await bounded.read(0, NOW + 1, 3, lambda each: each.number == 1)
    assert await bounded.forget(matches, request_id="same") == 7, "all of them, however many there are"
    await kept.flush()


async def test_forgets_only_what_matches_where_clients_chose_the_same_id(tmp_path: Path) -> None:
    activity = ActivityLog(ActivitySection())
    kept = RequestLog(activity, Database(str(tmp_path / "log.db")), lambda: NOW)
    kept.retention_days = 1
    for number, key_id in ((1, "abcdefgh"), (2, "ijklmnop"), (3, "abcdefgh")):
        activity.append(replace(record(number, NOW - number), id=b"same", key_id=key_id))
    assert await kept.forget(lambda each: each.number == 1) == 1
    assert [each.number for each in await kept.read(0, NOW + 1, 9, lambda _: True)] == [2, 3]
    await kept.flush()


async def test_one_thread_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect, writers = Sqlite.connect, set[int]()

    def watched(driver: Sqlite, work_s: float) -> Any:
        def note(action: int, table: str | None, *_: object) -> int:
            if action in (sqlite3.SQLITE_INSERT, sqlite3.SQLITE_DELETE) and table == "request_log":
                writers.add(threading.get_ident())
            return sqlite3.SQLITE_OK

        connection: Any = connect(driver, work_s)
        connection.set_authorizer(note)
        return connection

    activity, opened = ActivityLog(ActivitySection()), Database(str(tmp_path / "log.db"))
    kept = RequestLog(activity, opened, lambda: NOW, LogLimits(page=2))
    kept.retention_days = 1
    await kept.flush()  # which creates the tables
    monkeypatch.setattr(Sqlite, "connect", watched)
    await opened.call(opened.close_connection)
    for number in range(5):
        activity.append(record(number, NOW - number))
    assert await kept.forget(lambda each: each.number > 0) == 4
    assert [each.number for each in await kept.read(0, NOW + 1, 9, lambda _: True)] == [0]
    assert len(writers) == 1
    await opened.close()


async def test_newest_requests_wait_when_there_is_no_room_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    activity = ActivityLog(ActivitySection())
    kept = RequestLog(activity, Database(str(tmp_path / "log.db")), lambda: NOW, LogLimits(waiting=3))
    kept.retention_days = 1

    def write(*_: object) -> None:
        for number in (3, 4, 5):
            activity.append(record(number, NOW + number))
        raise StoreError("away")

    with monkeypatch.context() as away:
        away.setattr(Database, "run", write)
        for number in (1, 2):
            activity.append(record(number, NOW + number))
        await kept.flush()
    assert [each.number for each in await kept.read(0, NOW + 9, 9, lambda _: True)] == [5, 4, 3]
    await kept.flush()


async def test_is_served_to_operators_and_to_owners_of_keys_after_a_restart(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    anna, boss = generate("anna"), generate("boss", operator=True)
    beast = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY})
    section = ActivitySection(requests=0, log_retention_days=7)
    keys = (anna.section, boss.section)
    client = await start_gateway(beast, keys=keys, activity=section)
    for key in (anna, boss):
        body = {"model": "a", "messages": [{"role": "user", "content": "private words"}]}
        status, _ = await client.post("/v1/chat/completions", body, Authorization=f"Bearer {key.text}")
        assert status == 200
    path, bearer = "/fleet/activity?since=0", f"Bearer {boss.text}"
    await client.get_until(path, lambda page: page["requests"], Authorization=bearer)
    await client.gateway.close()
    client = await start_gateway(beast, keys=keys, activity=section)

    async def listed(key_text: str, path: str = "/fleet/activity?since=2020-01-01") -> list[str]:
        status, page = await client.get(path, Authorization=f"Bearer {key_text}")
        assert status == 200, page
        assert "private" not in str(page)
        return [each["key"] for each in page["requests"]]

    assert await listed(boss.text) == ["boss", "anna"]
    assert await listed(anna.text) == ["anna"]
    assert await listed(boss.text, "/fleet/activity?since=2020-01-01&key=anna") == ["anna"]
    assert await listed(boss.text, "/fleet/activity?until=2020-01-01") == []
    _, page = await client.get("/fleet/activity?since=0", Authorization=f"Bearer {boss.text}")
    path = f"/fleet/activity/{page['requests'][0]['id']}"
    assert (await client.get(path, Authorization=f"Bearer {boss.text}"))[0] == 200
    async with client.session.delete(client.url + path, headers={"Authorization": f"Bearer {boss.text}"}) as gone:
        assert gone.status == 200
    assert await listed(boss.text) == ["anna"]


async def test_says_what_to_set_where_there_is_none(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    client = await start_gateway(await neurons("beast"))
    status, body = await client.get("/fleet/activity?since=0")
    assert status == 400
    assert "log_retention_days" in body["error"]["message"]
