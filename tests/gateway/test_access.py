"""Who gets in when the last key is gone: nobody, unless the operator opens the gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from cortex.fleet.catalogue import Catalogue
from cortex.gateway.config import Config
from cortex.gateway.ledger.keys import NewKey, generate
from cortex.gateway.ledger.store import open_store
from cortex.settings import Listen, SettingsError

from ..waiting import WAIT_S

if TYPE_CHECKING:
    from .started_gateway import StartGateway


def bearer(key: NewKey) -> dict[str, str]:
    return {"authorization": f"Bearer {key.text}"}


def changed(config: Config, *keys: NewKey, is_open: bool = False) -> Config:
    gateway = msgspec.structs.replace(config.gateway, open=is_open)
    return msgspec.structs.replace(config, gateway=gateway, keys=tuple(key.section for key in keys))


async def test_reload_without_keys_rejects_everybody_until_opened(
    start_gateway: StartGateway, caplog: pytest.LogCaptureFixture
) -> None:
    key = generate("anna", operator=True)
    client = await start_gateway(keys=(key.section,))
    gateway = client.gateway

    await gateway.reconfigure(changed(gateway.config), Catalogue())
    for headers in ({}, bearer(key)):
        assert (await client.get("/v1/models", **headers))[0] == 401
        assert (await client.post("/v1/chat/completions", {"model": "a", "messages": []}, **headers))[0] == 401
        assert (await client.post("/fleet/models/a/unload", **headers))[0] == 401
    assert "set gateway.open = true" in caplog.text

    await gateway.reconfigure(changed(gateway.config, is_open=True), Catalogue())
    assert (await client.get("/v1/models"))[0] == 200

    await gateway.reconfigure(changed(gateway.config, key, is_open=True), Catalogue())
    assert (await client.get("/v1/models"))[0] == 401, "keys win over `open`"
    assert (await client.get("/v1/models", **bearer(key)))[0] == 200


async def test_gateway_whose_database_knows_keys_starts_closed(start_gateway: StartGateway) -> None:
    key = generate("anna")
    first = await start_gateway(keys=(key.section,))
    await first.gateway.close()

    closed = await start_gateway()
    assert (await closed.get("/v1/models"))[0] == 401
    opened = await start_gateway(open=True)
    assert (await opened.get("/v1/models"))[0] == 200


async def test_gateway_that_never_had_keys_stays_open(start_gateway: StartGateway, tmp_path: Path) -> None:
    open_store(str(tmp_path / "cortex-spend.db")).close_connection()  # as `cortex usage` leaves it
    client = await start_gateway()
    await client.gateway.reconfigure(client.gateway.config, Catalogue())
    assert (await client.get("/v1/models"))[0] == 200


async def test_gateway_that_is_open_until_it_has_keys_stays_closed_after_the_last_one(
    start_gateway: StartGateway,
) -> None:
    public: dict[str, Any] = {"listen": Listen("0.0.0.0:0"), "open_until_keys": True}
    client = await start_gateway(**public)
    assert (await client.get("/v1/models"))[0] == 200
    for keys in ((generate("anna"),), ()):
        await client.gateway.reconfigure(changed(client.gateway.config, *keys), Catalogue())
        assert (await client.get("/v1/models"))[0] == 401
    await client.gateway.close()
    again = await start_gateway(**public)
    assert (await again.get("/v1/models"))[0] == 401


@pytest.mark.parametrize("key", ["listen", "ollama_listen"])
async def test_public_address_without_keys_must_be_opened_explicitly(
    start_gateway: StartGateway, tmp_path: Path, key: str
) -> None:
    addresses: dict[str, Any] = {key: Listen("0.0.0.0:0")}
    with pytest.raises(SettingsError, match=r"0\.0\.0\.0:0 without keys.*cortex keys add.*gateway\.open = true"):
        await start_gateway(**addresses)
    assert not (tmp_path / "cortex-spend.db").exists()
    client = await start_gateway(**addresses, open=True)
    assert (await client.get("/v1/models"))[0] == 200

    local = msgspec.structs.replace(client.gateway.config.gateway, open=False, **{key: Listen("127.0.0.1:0")})
    for section in (local, msgspec.structs.replace(local, **addresses)):  # addresses change with a restart only
        with pytest.raises(SettingsError, match=r"gateway\.open = true"):
            await client.gateway.reconfigure(
                msgspec.structs.replace(client.gateway.config, gateway=section), Catalogue()
            )
    assert (await client.get("/v1/models"))[0] == 200, "what was in force stays"


async def test_gateway_without_keys_creates_no_database(start_gateway: StartGateway, tmp_path: Path) -> None:
    await start_gateway()
    assert not (tmp_path / "cortex-spend.db").exists()


async def test_address_for_ollama_is_part_of_the_access_checks(
    start_gateway: StartGateway, caplog: pytest.LogCaptureFixture
) -> None:
    client = await start_gateway(ollama_listen=Listen("0.0.0.0:0"), open=True)
    (warning,) = [record.getMessage() for record in caplog.records if "anybody who can reach" in record.getMessage()]
    assert "0.0.0.0:0" in warning
    section = msgspec.structs.replace(client.gateway.config.gateway, ollama_listen=Listen("gpu.example.com:11434"))
    renamed = msgspec.structs.replace(client.gateway.config, gateway=section)
    named = {"host": "gpu.example.com:11434"}
    assert (await client.get("/fleet/status", **named))[0] == 403
    await client.gateway.reconfigure(renamed, Catalogue())
    assert (await client.get("/fleet/status", **named))[0] == 200


@pytest.mark.parametrize("path", ["/fleet/events", "/fleet/activity/events"])
@pytest.mark.parametrize("is_revoked", [True, False])
async def test_stream_ends_when_its_key_is_revoked_or_demoted(
    start_gateway: StartGateway, path: str, is_revoked: bool
) -> None:
    key, other = generate("anna", operator=True), generate("olga", operator=True)
    client = await start_gateway(keys=(key.section, other.section))
    gateway = client.gateway
    demoted = msgspec.structs.replace(gateway.config, keys=(msgspec.structs.replace(key.section, operator=False),))
    async with (
        client.session.get(client.url + path, headers=bearer(key)) as stream,
        client.session.get(client.url + path, headers=bearer(other)) as unaffected,
    ):
        await stream.content.readuntil(b"\n\n")
        keys = (other.section,) if is_revoked else (other.section, *demoted.keys)
        await gateway.reconfigure(msgspec.structs.replace(gateway.config, keys=keys), Catalogue())
        await asyncio.wait_for(stream.content.read(), WAIT_S)
        assert not unaffected.content.at_eof()
