from __future__ import annotations

from pathlib import Path

import pytest

from cortex.gateway.database import Database
from cortex.gateway.dispatch.operator.audit import DAY_S, EXPIRE_S, AuditLimits, AuditLog, record_changed_keys
from cortex.gateway.ledger.keys import generate

NOW = 1_800_000_000.0


async def test_entries_are_kept_until_they_are_too_old_or_too_many(database: str) -> None:
    now = NOW
    log = AuditLog(Database(database), 2, lambda: now)
    log.record("POST /keys", 201, key_id="abcdefgh", key_name="anna", client="10.0.0.1", detail='{"name": "ben"}')
    now += 1
    log.record("DELETE /keys/ben", 403, key_id="ijklmnop", key_name="eve", client="10.0.0.2", detail="x" * 2000)
    newest, oldest = await log.read(0, NOW + 2, 10)
    assert (oldest.at_ms, oldest.key_name, oldest.status) == (NOW * 1000, "anna", 201)
    assert (newest.action, newest.client, len(newest.detail)) == ("DELETE /keys/ben", "10.0.0.2", 1000)
    assert [entry.key_name for entry in await log.read(0, NOW + 2, 1)] == ["eve"]
    assert [entry.key_name for entry in await log.read(0, NOW + 1, 10)] == ["anna"]
    for key in ("anna", "abcdefgh"):
        assert [entry.key_name for entry in await log.read(0, NOW + 2, 10, key)] == ["anna"]
    await log.flush()

    again = AuditLog(Database(database), 2, lambda: now, AuditLimits(entries=3))
    now = NOW + 2 * DAY_S + 0.5
    assert [entry.key_name for entry in await again.read(0, now, 10)] == ["eve"]
    for number in range(5):
        now += EXPIRE_S
        again.record("POST /fleet/pull", 200, detail=str(number))
        await again.flush()
    assert [entry.detail for entry in await again.read(0, now + 1, 10)] == ["4", "3", "2"]
    await again.flush()


async def test_entries_wait_for_the_database(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "folder").write_text("in its place")
    database = Database(str(tmp_path / "folder" / "audit.db"))
    log = AuditLog(database, 1)
    for number in range(2):
        log.record("POST /keys", 201, detail=str(number))
        await log.flush()
    assert caplog.text.count("the database is unavailable") == 1
    (tmp_path / "folder").unlink()
    assert [entry.detail for entry in await log.read(0, 1e11, 10)] == ["1", "0"]
    assert not database.is_failing
    await log.flush()


async def test_nothing_is_written_where_it_is_off_or_nothing_happened(tmp_path: Path) -> None:
    off, idle = AuditLog(Database(str(tmp_path / "off.db")), 0), AuditLog(Database(str(tmp_path / "idle.db")), 1)
    off.record("POST /keys", 201)
    for log in (off, idle):
        assert await log.read(0, 1e11, 10) == []
        await log.flush()
    assert not list(tmp_path.iterdir())


async def test_keys_that_a_reload_changes_are_recorded(tmp_path: Path) -> None:
    log = AuditLog(Database(str(tmp_path / "audit.db")), 1)
    anna, ben, eve = (generate(name).section for name in ("anna", "ben", "eve"))
    limited = generate("ben", requests_per_min=1).section
    changed = type(ben)(name=ben.name, id=ben.id, sha256=ben.sha256, requests_per_min=limited.requests_per_min)
    record_changed_keys(log, (anna, ben), (changed, eve))
    found = {entry.action.split()[1]: entry.detail for entry in await log.read(0, 1e11, 10)}
    assert found == {"added": "eve", "removed": "anna", "changed": "ben"}
    await log.flush()


async def test_nul_characters_are_recorded_and_do_not_end_the_log(database: str) -> None:
    log = AuditLog(Database(database), 1, lambda: NOW + 10 * DAY_S)
    log.record("POST /fleet/models/\0/load", 403, key_name="e\0ve", detail="\0")
    (entry, *_) = await log.read(NOW + 9 * DAY_S, NOW + 11 * DAY_S, 10)
    assert (entry.action, entry.key_name, entry.detail) == ("POST /fleet/models/\ufffd/load", "e\ufffdve", "\ufffd")
    await log.flush()


async def test_attempts_without_a_key_push_out_only_each_other(tmp_path: Path) -> None:
    now = NOW
    log = AuditLog(Database(str(tmp_path / "audit.db")), 1, lambda: now, AuditLimits(rejected=3, without_key=1))
    for number, (status, key_id) in enumerate([(403, "abcdefgh"), (200, ""), (401, ""), (502, ""), (401, "")]):
        now += 1
        log.record("POST /session", status, key_id=key_id, detail=str(number))
    await log.flush()
    now += EXPIRE_S
    assert [entry.detail for entry in await log.read(0, now, 10)] == ["4", "1", "0"]
    await log.flush()


async def test_rejected_requests_do_not_push_out_changes(tmp_path: Path) -> None:
    now = NOW
    log = AuditLog(Database(str(tmp_path / "audit.db")), 1, lambda: now, AuditLimits(entries=4, rejected=2))
    for number, status in enumerate([201, *[403] * 5, 200]):
        now += 1
        log.record("POST /fleet/pull", status, detail=str(number))
    await log.flush()
    now += EXPIRE_S
    assert [entry.detail for entry in await log.read(0, now, 10)] == ["6", "5", "4", "0"]
    await log.flush()


async def test_sign_ins_do_not_push_out_changes(database: str) -> None:
    now = NOW + 20 * DAY_S
    log = AuditLog(Database(database), 1, lambda: now, AuditLimits(sign_ins=2))
    log.record("POST /fleet/pull", 200, detail="a change")
    for number in range(5):
        now += 1
        log.record(("POST /session", "GET /session/callback")[number % 2], 200, key_id="abcdefgh", detail=str(number))
    await log.flush()
    now += EXPIRE_S
    assert [entry.detail for entry in await log.read(NOW + 20 * DAY_S, now, 10)] == ["4", "3", "a change"]
    await log.flush()
