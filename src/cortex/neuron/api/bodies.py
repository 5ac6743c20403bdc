"""The bodies of orders, and the headers that describe a request."""

from __future__ import annotations

from cortex.foreign.body import Access
from cortex.http.request import Request
from cortex.wire.errors import InvalidValue, shorten
from cortex.wire.fields.request_class import CLASSES, RequestClass, served_class
from cortex.wire.node import headers, kv_blocks
from cortex.wire.node.neighbours import Neighbour

_PRINCIPAL = headers.PRINCIPAL.encode()
_CLASS = headers.CLASS.encode()
_TENANT = headers.TENANT.encode()
_KV_SOURCE = kv_blocks.SOURCE.encode()
_TOKEN_LIMIT = headers.TOKEN_LIMIT.encode()
_FIELDS = headers.FIELDS.encode()
_WAITED = headers.WAITED.encode()
_MAX_LIMIT_DIGITS = 18


def principal_of(request: Request) -> str:
    """The principal that a gateway names, empty for other clients."""
    return (request.header(_PRINCIPAL) or b"").decode("utf-8", "backslashreplace")


def tenant_of(request: Request) -> bytes:
    """The tenant that a gateway names, empty for other clients."""
    return request.header(_TENANT) or b""


def class_of(request: Request, asked: RequestClass | None = None) -> RequestClass:
    """The class that a gateway names; `asked` for other clients. Raises InvalidValue."""
    if request.header(_PRINCIPAL) is None:
        return served_class(asked)
    value = (request.header(_CLASS) or b"default").decode("latin-1")
    for each in CLASSES:
        if each == value:
            return each
    raise InvalidValue(f"{headers.CLASS} must be one of {', '.join(CLASSES)}, got `{shorten(value)}`.")


def kv_source_of(request: Request) -> Neighbour | None:
    """The node that has computed more of the prompt, named by a gateway; None for other clients."""
    return kv_blocks.read_source(request.header(_KV_SOURCE))


def token_limit_of(request: Request) -> int | None:
    """A gateway's token limit for the request; None without a limit. Raises InvalidValue."""
    value = request.header(_TOKEN_LIMIT)
    if value is None:
        return None
    if not (value.isdigit() and len(value) <= _MAX_LIMIT_DIGITS):
        shown = shorten(value.decode("utf-8", "replace"))
        raise InvalidValue(f"{headers.TOKEN_LIMIT} must be a number of tokens, got `{shown}`.")
    return int(value)


def access_of(request: Request) -> Access:
    """Which fields a request may send to a server. Already parsed, so that known fields can be counted."""
    is_known_only = request.header(_FIELDS) is not None or request.header(_TOKEN_LIMIT) is not None
    return "known" if is_known_only else "any"


def gateway_s_of(request: Request) -> float:
    """How long a gateway held the request back; 0 for other clients."""
    value = request.header(_WAITED) or b""
    return int(value) / 1000 if value.isdigit() and len(value) <= _MAX_LIMIT_DIGITS else 0.0


def client_of(request: Request) -> str:
    """The unit of fairness between clients: the principal, or the address of a client without one."""
    return principal_of(request) or request.client


def strips_billing(request: Request, setting: bool) -> bool:
    """Whether this node removes the billing line from a body; gateways do that for their own clients."""
    return setting and request.header(_PRINCIPAL) is None
