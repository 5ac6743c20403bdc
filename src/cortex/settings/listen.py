"""The address a server binds."""

from __future__ import annotations

import ipaddress
from typing import Self


class Listen(str):
    """A well-formed `host:port`; IPv6 hosts are in brackets: `[::1]:31313`.

    Port 0 asks the system for a free port. Raises `ValueError` for any other text.
    """

    __slots__ = ("host", "port")
    host: str
    """Without brackets, as sockets expect it."""
    port: int

    def __new__(cls, text: str) -> Self:
        self = super().__new__(cls, text)
        host, separator, port = text.rpartition(":")
        if not separator:
            raise ValueError(f"expected `host:port`, such as `127.0.0.1:31313`, got `{text}`")
        self.host = _host(host, text)
        if not (port.isascii() and port.isdigit() and int(port) <= 65535):
            raise ValueError(f"expected a port between 0 and 65535 after the last colon, got `{text}`")
        self.port = int(port)
        return self

    @property
    def is_loopback(self) -> bool:
        """Whether only programs on this machine can reach it."""
        if self.host == "localhost" or self.host.endswith(".localhost"):
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def _host(host: str, text: str) -> str:
    if not host:
        raise ValueError(f"expected a host before the port, such as `0.0.0.0{text}` for every interface, got `{text}`")
    if host.startswith("[") and host.endswith("]"):
        try:
            ipaddress.IPv6Address(host[1:-1])
        except ValueError as error:
            raise ValueError(f"expected an IPv6 address in brackets, got `{text}`") from error
        return host[1:-1]
    if ":" in host:
        raise ValueError(f"expected an IPv6 host in brackets, such as `[::1]:31313`, got `{text}`")
    if any(character.isspace() or character in "/@[]" for character in host):
        raise ValueError(f"expected a host name or address without scheme or path, got `{text}`")
    return host
