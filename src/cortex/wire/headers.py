"""Our own headers between gateway, nodes and clients."""

from __future__ import annotations

from collections.abc import Iterable

from cortex.wire.errors import MAX_ECHO

PRINCIPAL = "x-cortex-principal"
"""The authenticated client of a request. Only a gateway sets it."""

NODE = "x-cortex-node"
"""The name of the node that served the request, from the gateway to the client."""

ANTHROPIC_REQUEST_ID = "request-id"
"""The name under which Anthropic's clients look for the id of a request."""

DROPPED_TOOLS = "x-cortex-dropped-tools"
"""Types of tools that were removed from a request because no model here can use them."""


def listed(values: Iterable[str]) -> str:
    """`values` as one header value, limited in length and without characters that could end the header."""
    kept = ("".join(c for c in value if c.isascii() and c.isprintable() and c != ",") for value in values)
    return ", ".join(dict.fromkeys(kept))[:MAX_ECHO]
