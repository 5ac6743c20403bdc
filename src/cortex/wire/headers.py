"""Headers of our own that the gateway and its nodes both know."""

from __future__ import annotations

from collections.abc import Iterable

from cortex.wire.errors import MAX_ECHO

PRINCIPAL = "x-cortex-principal"
"""Who asks, by the word of a gateway; only what came through one carries it."""

DROPPED_TOOLS = "x-cortex-dropped-tools"
"""Kinds of tools that were left out of a request because no model here can use them."""


def listed(values: Iterable[str]) -> str:
    """As one header value: what a client wrote must not break out of it, and little of it is repeated."""
    kept = ("".join(c for c in value if c.isascii() and c.isprintable() and c != ",") for value in values)
    return ", ".join(dict.fromkeys(kept))[:MAX_ECHO]
