"""A model that two nodes run together, the first of which serves it."""

from __future__ import annotations

from typing import Any

import msgspec

from cortex.fleet.catalogue import ModelSpec
from cortex.fleet.topology import Fleet, Node, Residency
from cortex.wire.node.protocol import ModelState, ModelStatus

from ..conftest import GIB

NODES = ("beast", "benjy")
SERVER = "vllm"


def group(size: float | None = 30, model_id: str = "big", **options: Any) -> ModelSpec:
    vram_mb = None if size is None else int(size * 1024)
    return ModelSpec(id=model_id, vram_mb=vram_mb, harness=SERVER, **({"nodes": NODES} | options))


def able(snapshot: Fleet) -> Fleet:
    """The fleet with nodes that run groups."""
    able = {"harnesses": ("torch", SERVER), "group_harnesses": (SERVER,)}
    return msgspec.structs.replace(
        snapshot, nodes=tuple(msgspec.structs.replace(node, **able) for node in snapshot.nodes)
    )


def with_member(node: Node, size: float, **facts: Any) -> Node:
    member = ModelStatus(
        id="big",
        nodes=NODES,
        rank=1,
        measured_bytes=int(size * GIB),
        **({"state": ModelState.READY, "devices": (0,)} | facts),
    )
    return msgspec.structs.replace(node, members=(member,))


def leading(held: Residency, **facts: Any) -> Residency:
    """The model on the node that leads it."""
    status = msgspec.structs.replace(held.status, **({"nodes": NODES, "harness": SERVER} | facts))
    return msgspec.structs.replace(held, status=status)
