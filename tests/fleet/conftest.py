"""Factories for fleets. Sizes are in GiB, ages in seconds before `NOW`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.fleet.devices import DeviceState
from cortex.fleet.rules import EvictionRules
from cortex.fleet.topology import Fleet, Node, Residency
from cortex.wire.node.contexts import ContextSizes
from cortex.wire.node.protocol import ModelLoad, ModelState, ModelStatus

GIB = 1024**3
NOW = 10_000.0


def _model(
    model_id: str,
    size: float = 8,
    *,
    state: ModelState = ModelState.READY,
    devices: tuple[int, ...] = (0,),
    age_s: float = 1000,
    idle_s: float = 100,
    running: int = 0,
    waiting: int = 0,
    kv: float = 0.0,
    in_flight: int = 0,
    pinned: bool = False,
    estimate: float | None = None,
    least: float | None = None,
    contexts: ContextSizes | None = None,
    context_tokens: int | None = None,
    reason: str | None = None,
    reason_code: str | None = None,
    source: str | None = None,
) -> Residency:
    status = ModelStatus(
        id=model_id,
        state=state,
        devices=devices,
        measured_bytes=None if estimate is not None else int(size * GIB),
        estimate_bytes=None if estimate is None else int(estimate * GIB),
        least_bytes=None if least is None else int(least * GIB),
        contexts=contexts,
        context_tokens=context_tokens,
        load=ModelLoad(running=running, waiting=waiting, kv_used_fraction=kv),
        state_age_s=age_s,
        idle_s=idle_s,
        reason=reason,
        reason_code=reason_code,
        source=source,
    )
    return Residency(status=status, seen_at=NOW, in_flight=in_flight, pinned=pinned)


def _node(
    name: str,
    sizes: Sequence[float],
    *models: Residency,
    foreign: float = 0,
    kept: float = 0,
    kept_share: float = 0.0,
    **facts: Any,
) -> Node:
    """A node with a device of each size; what its models hold is subtracted from the free bytes."""
    devices = []
    for index, size in enumerate(sizes):
        used = sum(
            (held.num_bytes or 0) // len(held.status.devices)
            for held in models
            if index in held.status.devices and held.state in ("ready", "unloading", "recovering")
        )
        devices.append(
            DeviceState(
                index=index,
                kind="cuda",
                name=f"card {size:g}G",
                total_bytes=int(size * GIB),
                free_bytes=max(0, int((size - foreign) * GIB) - used),
                foreign_bytes=int(foreign * GIB),
                kept_free_bytes=int(kept * GIB),
                kept_free_share=kept_share,
            )
        )
    facts = {"healthy": True} | facts
    return Node(name=name, devices=tuple(devices), residencies={held.model_id: held for held in models}, **facts)


def _fleet(*nodes: Node, specs: Sequence[ModelSpec] = (), **rules: Any) -> Fleet:
    return Fleet(nodes=nodes, catalogue=Catalogue(models=tuple(specs)), rules=EvictionRules(**rules))


def _spec(model_id: str, size: float | None = 8, **facts: Any) -> ModelSpec:
    return ModelSpec(id=model_id, vram_mb=None if size is None else int(size * 1024), **facts)


@pytest.fixture(scope="session")
def model() -> Callable[..., Residency]:
    return _model


@pytest.fixture(scope="session")
def node() -> Callable[..., Node]:
    return _node


@pytest.fixture(scope="session")
def fleet() -> Callable[..., Fleet]:
    return _fleet


@pytest.fixture(scope="session")
def spec() -> Callable[..., ModelSpec]:
    return _spec
