"""Which hosts and origins a program accepts from a caller without a key."""

import pytest

from cortex.http.cross_site import CrossSiteCheck
from cortex.wire.errors import CrossSiteRequest

CHECK = CrossSiteCheck(["Chat.Example.com"], ["https://chat.example"])


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:31313", "127.0.0.1:31313", "10.1.2.3", "[::1]:31313", "[2001:db8::1]", "beast:13131"),
        *("beast.internal:13131", "beast.local", "attic.lan", "app.localhost:80"),
        *("chat.example.com", "CHAT.example.com:31313", "chat.example.com.", None),
    ],
)
def test_accepts_addresses_private_names_and_configured_names(host: str) -> None:
    CHECK.check_host(host)
    CHECK.check_host(host)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:31313", "127.0.0.1.evil.example", "localhost.evil.example", "internal.evil"]
)
def test_rejects_public_names_of_others_every_time(host: str) -> None:
    for _ in range(2):
        with pytest.raises(CrossSiteRequest, match="allowed_hosts"):
            CHECK.check_host(host)


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        (None, "anything"),
        ("http://127.0.0.1:31313", "127.0.0.1:31313"),
        ("https://chat.example", "127.0.0.1:31313"),
    ],
)
def test_accepts_no_origin_the_same_origin_and_configured_origins(origin: str | None, host: str) -> None:
    CHECK.check_origin(origin, host)


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "", "http://127.0.0.1:8000", "https://chat.example.evil", "http://["]
)
def test_rejects_other_origins(origin: str) -> None:
    with pytest.raises(CrossSiteRequest):
        CHECK.check_origin(origin, "127.0.0.1:31313")


def test_what_the_browser_says_about_the_site_decides() -> None:
    CHECK.check_origin("https://llm.example", "127.0.0.1:31313", "same-origin")
    for site in ("cross-site", "same-site"):
        for origin in (None, "http://127.0.0.1:31313"):
            with pytest.raises(CrossSiteRequest):
                CHECK.check_origin(origin, "127.0.0.1:31313", site)
        CHECK.check_origin("https://chat.example", "127.0.0.1:31313", site)


def test_star_accepts_every_origin() -> None:
    CrossSiteCheck(origins=["*"]).check_origin("https://anyone.example", "x")
