from __future__ import annotations

import pytest

from cortex.settings import Listen


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("0.0.0.0:31313", "0.0.0.0", 31313, False),
        ("127.0.0.1:0", "127.0.0.1", 0, True),
        ("127.8.8.8:1", "127.8.8.8", 1, True),
        ("localhost:80", "localhost", 80, True),
        ("beast.internal:65535", "beast.internal", 65535, False),
        ("[::1]:31313", "::1", 31313, True),
        ("[::]:31313", "::", 31313, False),
    ],
)
def test_splits_an_address_into_host_and_port(text: str, host: str, port: int, loopback: bool) -> None:
    listen = Listen(text)
    assert (listen.host, listen.port, listen.is_loopback, str(listen)) == (host, port, loopback, text)


@pytest.mark.parametrize(
    "text",
    ["", "31313", ":31313", "host:", "host:x", "host:65536", "host:-1", "host:٣", "::1:80", "[::1]", "[nope]:1",
     "http://host:80", "a b:80", "host:80/path"],
)  # fmt: skip
def test_rejects_malformed_address(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        Listen(text)
