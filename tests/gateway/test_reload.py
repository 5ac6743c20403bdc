"""A reload is applied whole or not at all, and a failed one is visible."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from aiohttp import ClientSession

from cortex.gateway.configuration_files import ConfigurationFiles
from cortex.gateway.ledger.keys import NewKey, as_toml, generate
from cortex.gateway.server import Gateway
from cortex.wire.node.protocol import ModelState

from ..waiting import WAIT_S, until
from .fake_neuron import GB
from .started_gateway import Client

if TYPE_CHECKING:
    from .fake_neuron import StartNeuron
    from .started_gateway import Process, SpawnGateway


GATEWAY = '[gateway]\nlisten = "127.0.0.1:0"\nmetrics_listen = "127.0.0.1:0"\npoll_interval_s = 0.05\n'


class Files:
    """A gateway that runs on real configuration files."""

    def __init__(self, directory: Path) -> None:
        self.config = directory / "cortex.toml"
        self.models = directory / "models.toml"
        self.files = ConfigurationFiles(self.config, os.environ)

    def write(self, *parts: str) -> None:
        self.config.write_text(GATEWAY + "".join(parts))

    async def start(self, session: ClientSession) -> Client:
        config, catalogue = self.files.read()
        gateway = Gateway(config, catalogue, self.config.parent)
        _, port = await gateway.start()
        return Client(gateway, port, session)


def node(name: str, endpoint: str) -> str:
    return f'[[neurons]]\nname = "{name}"\nendpoint = "{endpoint}"\n'


def bearer(key: NewKey) -> dict[str, str]:
    return {"authorization": f"Bearer {key.text}"}


def unreadable(files: Files) -> None:
    files.config.unlink()
    files.config.mkdir()


BAD: dict[str, Callable[[Files, str], object]] = {
    "misspelt key": lambda files, good: files.write(good, "[eviction]\nstrategi = 1\n"),
    "wrong type": lambda files, good: files.write(good, '[eviction]\nmin_residency_s = "long"\n'),
    "not TOML": lambda files, good: files.write(good, "[eviction\n"),
    "nested beyond the parser's depth": lambda files, good: files.write(good, f"x = {'[' * 5000}\n"),
    "not UTF-8": lambda files, good: files.config.write_bytes(good.encode() + b'name = "\xff"\n'),
    "duplicate node": lambda files, good: files.write(good, node("twin", "http://a:1"), node("twin", "http://b:1")),
    "port out of range": lambda files, good: files.write(good, node("far", "http://127.0.0.1:99999")),
    "host that cannot be encoded": lambda files, good: files.write(good, node("far", "http://é..example:1")),
    "user in an endpoint": lambda files, good: files.write(good, node("far", "http://user@127.0.0.1:1")),
    "directory in place of the file": lambda files, good: unreadable(files),
    "missing file": lambda files, good: files.config.unlink(),
    "invalid catalogue": lambda files, good: files.models.write_text("models = 3\n"),
    "catalogue is a directory": lambda files, good: files.models.mkdir(),
    "misspelt node": lambda files, good: files.models.write_text('[[models]]\nid = "a"\npinned_on = ["baest"]\n'),
    "alias of nothing": lambda files, good: files.models.write_text('[aliases]\ndefault = "b"\n'),
}


@pytest.mark.parametrize("break_files", BAD.values(), ids=BAD)
async def test_bad_files_change_nothing_until_good_ones_follow(
    break_files: Callable[[Files, str], object], tmp_path: Path, neurons: StartNeuron
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY})
    revoked, kept = generate("revoked"), generate("kept", operator=True)
    files = Files(tmp_path)
    files.write(node("beast", beast.endpoint), as_toml(revoked.section), as_toml(kept.section))
    async with ClientSession() as session:
        client = await files.start(session)
        try:
            before = client.gateway.config
            good = node("beast", beast.endpoint) + as_toml(kept.section)
            break_files(files, good)
            await client.gateway.reload(files.files)

            assert client.gateway.config is before
            assert (await client.get("/v1/models", **bearer(revoked)))[0] == 200
            assert client.gateway.dispatcher.is_ready("a", "beast")
            health = (await client.get("/health", **bearer(kept)))[1]
            assert health["config"]["status"] == "stale"
            assert health["config"]["reason"]
            for headers in ({}, bearer(revoked), {"authorization": "Bearer unknown"}):
                assert (await client.get("/health", **headers))[1]["config"] == {"status": "stale"}
            assert 'cortex_config_reloads_total{result="rejected"} 1.0' in client.metrics()

            for path in (files.config, files.models):
                if path.is_dir():
                    path.rmdir()
                path.unlink(missing_ok=True)
            files.write(good)
            await client.gateway.reload(files.files)
            assert (await client.get("/v1/models", **bearer(revoked)))[0] == 401
            assert (await client.get("/health", **bearer(kept)))[1]["config"] == {"status": "current"}
            assert 'cortex_config_reloads_total{result="applied"} 1.0' in client.metrics()
        finally:
            await client.gateway.close()


async def test_reload_changes_who_shares_prefixes(tmp_path: Path, neurons: StartNeuron) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY})
    anna, files = generate("anna"), Files(tmp_path)
    sections = node("beast", beast.endpoint) + as_toml(anna.section)
    files.write(sections)
    async with ClientSession(headers={"content-type": "application/json"}) as session:
        client = await files.start(session)
        try:
            for setting in ("", 'prefix_sharing = "all"\n'):
                files.write(setting, sections)
                await client.gateway.reload(files.files)
                assert (await client.post("/v1/chat/completions", {"model": "a", "messages": []}, **bearer(anna)))[
                    0
                ] == 200
        finally:
            await client.gateway.close()
    assert ["x-cortex-tenant" in seen.headers for seen in beast.seen] == [True, False]


async def test_database_that_cannot_be_opened_keeps_nodes_and_access(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.write()
    async with ClientSession() as session:
        client = await files.start(session)
        try:
            (tmp_path / "cortex-spend.db").mkdir()
            key = generate("anna")
            files.write(node("new", "http://127.0.0.1:9"), as_toml(key.section))
            await client.gateway.reload(files.files)
            assert (await client.get("/health"))[1]["nodes"] == {}
            assert (await client.get("/v1/models"))[0] == 200
            (tmp_path / "cortex-spend.db").rmdir()
            await client.gateway.reload(files.files)
            assert (await client.get("/health"))[1]["nodes"] == {"up": 0, "down": 1}
            assert (await client.get("/v1/models"))[0] == 401
        finally:
            await client.gateway.close()


async def test_unexpected_failure_of_one_node_keeps_keys_and_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_certificates(**_: object) -> None:
        raise RuntimeError("the certificates of this host cannot be read")

    revoked, kept = generate("revoked"), generate("kept", operator=True)
    files = Files(tmp_path)
    files.write(as_toml(revoked.section), as_toml(kept.section))
    async with ClientSession() as session:
        client = await files.start(session)
        try:
            monkeypatch.setattr("ssl.create_default_context", no_certificates)
            files.write(node("near", "http://127.0.0.1:9"), node("far", "https://127.0.0.1:9"), as_toml(kept.section))
            await client.gateway.reload(files.files)
            health = (await client.get("/health", **bearer(kept)))[1]
            assert health["nodes"] == {}
            assert "certificates of this host" in health["config"]["reason"]
            assert (await client.get("/v1/models", **bearer(revoked)))[0] == 200
            assert "Traceback" in caplog.text
            monkeypatch.undo()
            await client.gateway.reload(files.files)
            assert list((await client.get("/health", **bearer(kept)))[1]["nodes"]) == ["near", "far"]
            assert (await client.get("/v1/models", **bearer(revoked)))[0] == 401
        finally:
            await client.gateway.close()


async def test_invalid_database_url_is_rejected_with_a_reason(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    files = Files(tmp_path)
    files.write()
    async with ClientSession() as session:
        client = await files.start(session)
        try:
            files.write('[ledger]\ndatabase = "postgresql://%zz"\n', as_toml(generate("anna").section))
            await client.gateway.reload(files.files)
            assert (await client.get("/health"))[1]["config"]["status"] == "stale"
            assert (await client.get("/v1/models"))[0] == 200
        finally:
            await client.gateway.close()


async def test_listen_change_applies_the_rest_and_names_the_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = Files(tmp_path)
    files.write()
    async with ClientSession() as session:
        client = await files.start(session)
        try:
            text = GATEWAY.replace("127.0.0.1:0", "127.0.0.1:1") + node("new", "http://127.0.0.1:9")
            files.config.write_text(text)
            await client.gateway.reload(files.files)
            assert list((await client.get("/health"))[1]["nodes"]) == ["new"]
            assert "gateway.listen has changed: restart the gateway to use it" in caplog.text
        finally:
            await client.gateway.close()


async def test_file_that_changes_during_the_start_is_read_again(
    spawn: SpawnGateway, neurons: StartNeuron, tmp_path: Path
) -> None:
    slow = await neurons("slow", control_gate=asyncio.Event())  # the start waits for its first response
    added = generate("added", operator=True)
    starting = asyncio.ensure_future(spawn(slow))
    async with asyncio.timeout(WAIT_S):
        await slow.asked.wait()
    with (tmp_path / "cortex.toml").open("a") as config:
        config.write(as_toml(added.section))
    slow.control_gate.set()
    gateway = await starting
    await until(lambda: "configuration reloaded" in gateway.log)
    async with ClientSession() as session:
        url = f"http://127.0.0.1:{gateway.port}/v1/models"
        async with session.get(url) as response:
            assert response.status == 401
        async with session.get(url, headers=bearer(added)) as response:
            assert response.status == 200


async def rejected(gateway: Process, count: int) -> None:
    """Waits until the gateway has rejected that many configurations."""
    await until(lambda: gateway.log.count("configuration not reloaded") >= count)


async def test_watcher_survives_bad_files_and_applies_the_next_good_one(spawn: SpawnGateway, tmp_path: Path) -> None:
    revoked, operator = generate("revoked"), generate("operator", operator=True)
    gateway = await spawn(extra=as_toml(revoked.section) + as_toml(operator.section))
    config = tmp_path / "cortex.toml"
    good = config.read_text().replace(as_toml(revoked.section), "")
    for bad in (node("far", "http://127.0.0.1:99999"), f"x = {'[' * 5000}\n"):
        rejections = gateway.log.count("configuration not reloaded")
        config.write_text(good + bad)
        gateway.process.send_signal(signal.SIGHUP)
        await rejected(gateway, rejections + 1)
    config.write_text(good)  # found by the watcher, without a signal
    await until(lambda: "configuration reloaded" in gateway.log)
    health = msgspec.json.decode(await gateway.get("/health"))
    assert health["config"] == {"status": "current"}
    async with ClientSession() as session:
        url = f"http://127.0.0.1:{gateway.port}/v1/models"
        async with session.get(url, headers=bearer(revoked)) as response:
            assert response.status == 401
