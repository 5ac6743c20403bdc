"""Only https addresses of the public internet are fetched."""

from __future__ import annotations

import pytest

from cortex.gateway.pictures import ForbiddenAddress, chosen, is_public, read_address

PRIVATE = [
    "127.0.0.1",
    "127.255.0.9",
    "0.0.0.0",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "100.127.255.254",
    "192.0.0.1",
    "192.0.2.1",
    "198.18.0.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "fe80::1",
    "fe80::1%eth0",
    "fc00::1",
    "fd12::1",
    "fec0::1",
    "ff02::1",
    "2001:db8::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:0:127.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "2002:7f00:1::",
    "2001:0:7f00:1::",
    "not an address",
    "",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_address_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["93.184.216.34", "8.8.8.8", "2606:4700::6810:84e5", "::ffff:8.8.8.8"])
def test_public_address(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("address", PRIVATE)
def test_name_with_one_private_address_is_rejected(address: str) -> None:
    with pytest.raises(ForbiddenAddress, match="not on the public internet"):
        chosen(["8.8.8.8", address])


def test_first_address_is_chosen() -> None:
    assert chosen(["8.8.4.4", "8.8.8.8"]) == "8.8.4.4"
    with pytest.raises(ForbiddenAddress, match="no address"):
        chosen([])


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://example.org/x.png", "only https"),
        ("file:///etc/passwd", "address is invalid|only https"),
        ("ftp://example.org/x.png", "only https"),
        ("https://user:secret@example.org/x.png", "password"),
        ("https:///x.png", "its address is invalid"),
        ("https://example.org:99999/x.png", "its address is invalid"),
        ("https://example.org/a b.png", "its address is invalid"),
        ("https://example.org/x\r\nhost: other", "address is invalid|password|ASCII"),
        ("https://example.org/" + "x" * 3000, "its address is invalid"),
        ("https://example.org/ä.png", "ASCII"),
        ("https://other.org/x.png", r"pictures\.hosts"),
        ("https://badexample.org/x.png", r"pictures\.hosts"),
    ],
)
def test_forbidden_urls(url: str, problem: str) -> None:
    with pytest.raises(ForbiddenAddress, match=problem):
        read_address(url, ("example.org", ".example.com"))


@pytest.mark.parametrize(
    ("url", "origin", "target"),
    [
        ("https://example.org", "https://example.org", "/"),
        ("HTTPS://Example.ORG./x.png?a=b#c", "https://example.org", "/x.png?a=b"),
        ("https://a.b.example.com:8443/x", "https://a.b.example.com:8443", "/x"),
    ],
)
def test_allowed_urls(url: str, origin: str, target: str) -> None:
    address = read_address(url, ("example.org", ".example.com"))
    assert (address.origin, address.target) == (origin, target)
