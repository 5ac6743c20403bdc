"""The API of a node on a port of this host."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from cortex.neuron.api.drain_gate import DrainGate
from cortex.neuron.api.server import NodeApi


@asynccontextmanager
async def served(
    node: Any, drain_gate: DrainGate | None = None, tls: ssl.SSLContext | None = None, **options: Any
) -> AsyncIterator[tuple[str, int]]:
    """The address of the API, which ends with the block; `options` are those of `NodeApi`."""
    api = NodeApi(node, drain_gate or DrainGate(), **options)
    try:
        yield await api.server.listen("127.0.0.1", 0, tls=tls)
    finally:
        await api.close()
