"""The data path with TLS on either side."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from asyncio.constants import SSL_SHUTDOWN_TIMEOUT
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cortex.http.limits import ClientLimits
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Handler, Response, Server
from cortex.http.tls import ServerCertificate, client_context
from cortex.http.upstream.faults import ConnectFailed
from cortex.settings import SettingsError

from ..waiting import WAIT_S, until_response

if TYPE_CHECKING:
    from ..certificates import Authority, Certificate
    from .conftest import Harness


@pytest.fixture(scope="module")
def certificate(authority: Authority) -> Certificate:
    return authority.issue("server", "DNS:localhost")


async def listen(
    harness: Harness,
    certificate: Certificate | ServerCertificate,
    handler: Handler,
    limits: ClientLimits = ClientLimits(),  # noqa: B008 - it is immutable
) -> int:
    server = Server(handler, lambda error, path: Response(error.status, (), b""), harness.ticker, limits)
    harness.servers.append(server)
    shown = certificate if isinstance(certificate, ServerCertificate) else ServerCertificate(*astuple(certificate))
    return (await server.listen("127.0.0.1", 0, tls=shown.context))[1]


async def test_relays_from_a_tls_node_and_checks_its_certificate(
    harness: Harness, certificate: Certificate, authority: Authority
) -> None:
    bodies = []

    def node(exchange: Exchange) -> None:
        bodies.append(exchange.request.body)
        exchange.start(200, ((b"content-type", b"text/event-stream"),))
        exchange.write(b"data: secret\n\n")
        exchange.finish()

    tls_port = await listen(harness, certificate, node)
    with pytest.raises(ConnectFailed, match="certificate"):
        await harness.pool(f"https://localhost:{tls_port}").fetch(b"GET", b"/", timeout_s=WAIT_S)
    trust = ssl.create_default_context(cafile=authority.own.cert)
    with pytest.raises(ConnectFailed, match="mismatch"):
        await harness.pool(f"https://127.0.0.1:{tls_port}", tls=trust).fetch(b"GET", b"/", timeout_s=WAIT_S)
    pool = harness.pool(f"https://localhost:{tls_port}", tls=trust)
    _, port = await harness.relaying(pool)
    body = bytes(2_000_000)
    reader, writer = await harness.client(port)
    for _ in range(2):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert (await harness.read_message(reader))[1] == b"data: secret\n\n"
    assert bodies == [body, body]
    assert len(pool.connections) == 1


async def test_notices_a_tls_client_that_disconnects_or_misbehaves(
    harness: Harness, certificate: Certificate, authority: Authority
) -> None:
    exchanges: list[Exchange] = []
    port = await listen(harness, certificate, exchanges.append)
    context = ssl.create_default_context(cafile=authority.own.cert)
    _, writer = await asyncio.open_connection("localhost", port, ssl=context)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await harness.eventually(lambda: len(exchanges) == 1)
    writer.transport.abort()
    await harness.eventually(lambda: exchanges[0].disconnected)
    reader, writer = await asyncio.open_connection("localhost", port, ssl=context)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
    writer.close()


def respond(exchange: Exchange) -> None:
    exchange.respond(200, (), b"hello")


async def get(port: int, context: ssl.SSLContext) -> bytes:
    reader, writer = await asyncio.open_connection("localhost", port, ssl=context)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    response = await reader.read()
    writer.close()
    return response


async def get_in_the_end(port: int, context: ssl.SSLContext) -> bytes:
    async def ask() -> bytes:
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            return await get(port, context)
        return b""

    return await until_response(ask)


async def test_unfinished_handshakes_end_after_the_time_for_heads(harness: Harness, certificate: Certificate) -> None:
    port = await listen(harness, certificate, respond, ClientLimits(head_s=0.2))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert await reader.read() == b""
    writer.close()


async def test_unfinished_handshakes_count_as_connections(
    harness: Harness, certificate: Certificate, authority: Authority
) -> None:
    port = await listen(harness, certificate, respond, ClientLimits(num_connections_per_client=3, head_s=WAIT_S))
    context = ssl.create_default_context(cafile=authority.own.cert)
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    with pytest.raises((ConnectionError, ssl.SSLError)):
        await get(port, context)
    for _, writer in silent:
        writer.close()
    assert (await get_in_the_end(port, context)).endswith(b"hello")


async def test_shutdown_does_not_wait_for_the_library_to_close_idle_connections(
    harness: Harness, certificate: Certificate, authority: Authority
) -> None:
    """A client that reads nothing until its next request does not confirm the end."""
    port = await listen(harness, certificate, respond, ClientLimits(linger_s=0.1))
    context = ssl.create_default_context(cafile=authority.own.cert)
    reader, writer = await asyncio.open_connection("localhost", port, ssl=context)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"hello")
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    async with asyncio.timeout(SSL_SHUTDOWN_TIMEOUT / 2):
        await harness.servers[-1].close(grace_s=WAIT_S)
    writer.transport.abort()


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\xff\xff" + bytes(500),
        b"\x80\x2e\x01\x00\x02",
        bytes(70_000),
    ],
)
async def test_closes_what_is_not_tls_and_goes_on(
    harness: Harness, certificate: Certificate, authority: Authority, caplog: pytest.LogCaptureFixture, junk: bytes
) -> None:
    port = await listen(harness, certificate, respond, ClientLimits(head_s=1.0))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(junk)
    try:
        assert b"HTTP" not in await reader.read()
    except ConnectionError:
        pass
    writer.close()
    context = ssl.create_default_context(cafile=authority.own.cert)
    assert (await get_in_the_end(port, context)).endswith(b"hello")
    assert "Traceback" not in caplog.text


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1")
async def test_rejects_versions_before_1_2(harness: Harness, certificate: Certificate, authority: Authority) -> None:
    port = await listen(harness, certificate, respond)
    context = ssl.create_default_context(cafile=authority.own.cert)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises((ConnectionError, ssl.SSLError)):
        await get(port, context)


async def serial(port: int, context: ssl.SSLContext) -> str:
    """The serial number of the certificate that a new connection gets."""
    _, writer = await asyncio.open_connection("localhost", port, ssl=context)
    found = writer.get_extra_info("ssl_object").getpeercert()["serialNumber"]
    writer.close()
    return str(found)


async def test_new_connections_get_the_renewed_certificate_and_open_ones_go_on(
    harness: Harness, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def install(made: Certificate) -> None:
        shutil.copy(made.cert, tmp_path / "cert.pem")
        shutil.copy(made.key, tmp_path / "key.pem")

    install(authority.issue("first"))
    shown = ServerCertificate(tmp_path / "cert.pem", tmp_path / "key.pem")
    port = await listen(harness, shown, respond)
    context = client_context(authority.own.cert)
    before = await serial(port, context)
    reader, writer = await asyncio.open_connection("localhost", port, ssl=context)

    (tmp_path / "key.pem").write_bytes(authority.own.key.read_bytes())
    shown.reload_if_changed()
    assert "belong together" in (shown.stale_reason or "")
    assert "old one stays in force" in caplog.text
    assert await serial(port, context) == before, "a pair that does not match is not used"

    install(authority.issue("second"))
    shown.reload_if_changed()
    assert shown.stale_reason is None
    assert await serial(port, context) != before
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await harness.read_message(reader))[1] == b"hello", "the connection from before is still open"
    writer.close()


@pytest.mark.parametrize("broken", ["missing", "empty", "wrong key", "encrypted key"])
def test_rejects_a_pair_that_cannot_be_used(authority: Authority, tmp_path: Path, broken: str) -> None:
    made = authority.issue("broken")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(made.cert.read_bytes())
    if broken == "empty":
        key.write_bytes(b"")
    elif broken == "wrong key":
        key.write_bytes(authority.own.key.read_bytes())
    elif broken == "encrypted key":
        subprocess.run(["openssl", "ec", "-in", made.key, "-aes128", "-passout", "pass:x", "-out", key], check=True)
    with pytest.raises(SettingsError, match="tls_key"):
        ServerCertificate(cert, key)


@pytest.mark.parametrize("text", [None, "", "no certificate"])
def test_rejects_a_ca_file_without_certificates(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "ca.pem").write_text(text)
    with pytest.raises(SettingsError, match="ca_file"):
        client_context(tmp_path / "ca.pem")
