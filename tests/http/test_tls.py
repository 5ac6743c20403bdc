"""The data path with TLS on either side."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess

import pytest

from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Server
from cortex.http.upstream.faults import ConnectFailed

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-nodes", "-days", "1", "-keyout", "key.pem", "-out", "cert.pem"),
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
        ],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return folder


async def listen(harness, certificate, handler) -> int:
    server = Server(handler, lambda error, path: (error.status, (), b""), harness.ticker)
    harness.servers.append(server)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    return (await server.listen("127.0.0.1", 0, tls=context))[1]


async def test_relays_from_a_tls_node_and_checks_its_certificate(harness, certificate, monkeypatch):
    bodies = []

    def node(exchange: Exchange) -> None:
        bodies.append(exchange.request.body)
        exchange.start(200, ((b"content-type", b"text/event-stream"),))
        exchange.write(b"data: secret\n\n")
        exchange.finish()

    tls_port = await listen(harness, certificate, node)
    with pytest.raises(ConnectFailed, match="certificate"):
        await harness.pool(f"https://localhost:{tls_port}").fetch(b"GET", b"/", timeout_s=30)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "cert.pem"))
    pool = harness.pool(f"https://localhost:{tls_port}")
    _, port = await harness.relaying(pool)
    body = bytes(2_000_000)
    reader, writer = await harness.client(port)
    for _ in range(2):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert (await harness.read_message(reader))[1] == b"data: secret\n\n"
    assert bodies == [body, body]
    assert len(pool.connections) == 1


async def test_notices_a_tls_client_that_disconnects_or_misbehaves(harness, certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "cert.pem"))
    exchanges: list[Exchange] = []
    port = await listen(harness, certificate, exchanges.append)
    context = ssl.create_default_context()
    _, writer = await asyncio.open_connection("localhost", port, ssl=context)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await harness.eventually(lambda: len(exchanges) == 1)
    writer.transport.abort()
    await harness.eventually(lambda: exchanges[0].disconnected)
    reader, writer = await asyncio.open_connection("localhost", port, ssl=context)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
    writer.close()
