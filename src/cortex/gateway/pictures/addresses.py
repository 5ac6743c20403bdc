"""Which addresses pictures may be fetched from. Pure.

A client must not reach through the gateway what it cannot reach itself: the operator's network, this host, and the
metadata services of clouds.
"""

from __future__ import annotations

import ipaddress
from typing import NamedTuple
from urllib.parse import urlsplit

_MAX_URL = 2048
_TRANSLATED = tuple(
    map(ipaddress.IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::ffff:0:0:0/96"))
)
"""Networks whose addresses contain one of IPv4, which a gateway on the way would reach."""


class ForbiddenAddress(ValueError):
    """The address may not be fetched. The message says why."""


class PictureAddress(NamedTuple):
    """Where a picture is, before its host is resolved."""

    host: str
    port: int
    target: str
    """Path and query."""

    @property
    def origin(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"https://{host}" if self.port == 443 else f"https://{host}:{self.port}"


def read_address(url: str, hosts: tuple[str, ...]) -> PictureAddress:
    """The parts of an https URL, at one of `hosts` if there are any. Raises ForbiddenAddress."""
    try:
        parts = urlsplit(url)
        port = parts.port or 443
        host = (parts.hostname or "").rstrip(".").encode("ascii" if url.isascii() else "idna").decode().lower()
    except ValueError:  # of ports, and of host names that cannot be encoded
        raise ForbiddenAddress("it is no valid address") from None
    if parts.scheme.lower() != "https":
        raise ForbiddenAddress("only https addresses are fetched")
    if len(url) > _MAX_URL or not url.isprintable() or " " in url or not host:
        raise ForbiddenAddress("it is no valid address")
    if parts.username is not None or parts.password is not None:
        raise ForbiddenAddress("it contains a name or a password")
    if hosts and not any(host == name or (name.startswith(".") and host.endswith(name)) for name in hosts):
        raise ForbiddenAddress("its host is not among those that the operator allows (pictures.hosts)")
    path = parts.path or "/"
    target = f"{path}?{parts.query}" if parts.query else path
    if not target.isascii():
        raise ForbiddenAddress("it must be encoded as ASCII")
    return PictureAddress(host, port, target)


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:  # also of a scoped address, which is local
        return False
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return is_public(str(found.ipv4_mapped))
        if found.is_site_local or found.scope_id is not None or any(found in network for network in _TRANSLATED):
            return False
    return found.is_global and not found.is_multicast and not found.is_unspecified and not found.is_reserved


def chosen(addresses: list[str]) -> str:
    """The address to connect to. Raises ForbiddenAddress where one of them is not public: a name with both kinds is
    made to deceive."""
    if not addresses:
        raise ForbiddenAddress("its host has no address")
    if not all(map(is_public, addresses)):
        raise ForbiddenAddress("its host is not on the public internet")
    return addresses[0]
