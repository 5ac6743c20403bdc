"""A model over two nodes, the first of which serves it."""

from __future__ import annotations

from typing import Any

import msgspec

from cortex.fleet.catalogue import ModelSpec
from cortex.fleet.topology import Node, Residency
from cortex.wire.node.protocol import ModelShare

from ..conftest import GIB

NODES = ("beast", "benjy")


def spanning(size: float | None = 30, **options: Any) -> ModelSpec:
    vram_mb = None if size is None else int(size * 1024)
    return ModelSpec(id="big", vram_mb=vram_mb, nodes=NODES, **options)


def staged(size: float | None = 30, **options: Any) -> ModelSpec:
    return spanning(size, **({"pipeline_parallel": 2} | options))


def with_share(node: Node, size: float, **facts: Any) -> Node:
    share = ModelShare(
        model_id="big", lead="beast", devices=(0,), num_bytes=int(size * GIB), **({"state": "ready"} | facts)
    )
    return msgspec.structs.replace(node, shares=(share,))


def leading(held: Residency, **facts: Any) -> Residency:
    """The model on the node that leads it."""
    status = msgspec.structs.replace(held.status, **({"nodes": NODES, "parallel": "tensor"} | facts))
    return msgspec.structs.replace(held, status=status)
