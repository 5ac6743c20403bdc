"""What the headers of a request say about its body."""

from __future__ import annotations

from cortex.http.request import Request
from cortex.wire.node import headers

_PRINCIPAL = headers.PRINCIPAL.encode()


def principal_of(request: Request) -> str:
    """The principal that a gateway names, empty for other clients."""
    return (request.header(_PRINCIPAL) or b"").decode("utf-8", "backslashreplace")


def client_of(request: Request) -> str:
    """Who shares what all clients share: the principal, or the address of a client without one."""
    return principal_of(request) or request.client


def strips_billing(request: Request, setting: bool) -> bool:
    """Whether this node removes the billing line from a body: a gateway has its own setting for its clients."""
    return setting and request.header(_PRINCIPAL) is None
