"""Requests that a web page makes a browser send, to a program that the page itself could not reach.

A page of another site can send simple requests to any address that its visitor can reach (`Origin` gives it away), and
with a DNS name of its own that changes to that address it can also read the responses (`Host` gives that away). Neither
works against a request that needs a key: browsers do not add it by themselves.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from cortex.wire.errors import CrossSiteRequest, shorten

ANY_ORIGIN = "*"
_PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".lan", ".home", ".home.arpa", ".intranet", ".test")
"""Suffixes that are not in the public DNS, so that no outsider can point a name at this program."""
_MAX_REMEMBERED = 1000


class CrossSiteCheck:
    """Which hosts and origins a program accepts. Belongs to one event loop."""

    def __init__(self, hosts: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        """`hosts`: names under which the program is reachable, in addition to those that nobody else can own.
        `origins`: web origins whose scripts may use it; `*` accepts all."""
        self._accepted_hosts: set[str] = set()
        """`Host` headers that were accepted before."""
        self.use(hosts, origins)

    def use(self, hosts: Iterable[str], origins: Iterable[str]) -> None:
        """Use other names and origins."""
        self._hosts = frozenset(name.lower().rstrip(".") for name in (*hosts, socket.gethostname()))
        self._origins = frozenset(origins)
        self._accepted_hosts.clear()

    def check_host(self, host: str | None) -> None:
        """Raise `CrossSiteRequest` when the `Host` header is a public DNS name that is not this program's."""
        if host is None or host in self._accepted_hosts:
            return
        if not self._is_own(host):
            raise CrossSiteRequest(
                f"This program is not known as {shorten(host)!r}, so a web page may have sent this request. Use its IP"
                " address or send a key; or add the name to `allowed_hosts` in the configuration."
            )
        if len(self._accepted_hosts) < _MAX_REMEMBERED:
            self._accepted_hosts.add(host)

    def check_origin(self, origin: str | None, host: str | None, fetch_site: str | None = None) -> None:
        """Raise `CrossSiteRequest` when a page of another site sent the request.

        `fetch_site` is the `Sec-Fetch-Site` header. It is right where a proxy has changed the `Host`, but browsers send
        it only over HTTPS and to local addresses. Other clients send neither it nor `Origin`.
        """
        if fetch_site == "same-origin" or ANY_ORIGIN in self._origins or origin in self._origins:
            return
        is_same = origin is None or (host is not None and _address_of(origin) == host.lower())
        if is_same and fetch_site not in ("cross-site", "same-site"):
            return
        raise CrossSiteRequest(
            f"Web pages of {shorten(origin or 'other sites')!r} may not control this program. An operator can allow an"
            " origin of the gateway with `cors_origins`."
        )

    def _is_own(self, host: str) -> bool:
        name = _without_port(host).lower().rstrip(".")
        if name in self._hosts or "." not in name or name.endswith(_PRIVATE_SUFFIXES):
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True


def _address_of(origin: str) -> str:
    """Host and port of an origin, or empty: `null`, and text that is no URL, have none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _without_port(host: str) -> str:
    name, separator, port = host.rpartition(":")
    return name if separator and port.isdigit() else host
