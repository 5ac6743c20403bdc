"""The gateway's `/fleet/status` as typed values. Unknown fields are ignored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

from cortex.cli.client import GatewayClient
from cortex.cli.output import size
from cortex.fleet.topology import RESERVES
from cortex.wire.node.protocol import HostHealth, ModelStatus, NodeValue


class DeviceView(NodeValue, frozen=True, kw_only=True):
    index: int
    name: str
    total_bytes: int
    free_bytes: int
    foreign_bytes: int = 0
    ceiling_bytes: int | None = None
    """Ceiling for models there."""
    extra_replica_bytes: int = 0
    """The part of `free_bytes` that extra replicas hold."""
    kv_host_bytes: int = 0
    """Host memory of KV pages that are not on the device."""
    watts: float | None = None

    @property
    def short_name(self) -> str:
        return self.name.removeprefix("NVIDIA ").removeprefix("GeForce ")

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.free_bytes + self.extra_replica_bytes


class HostView(HostHealth, frozen=True, kw_only=True):
    """The memory of a node's host."""

    @property
    def used_bytes(self) -> int:
        """Bytes that models hold."""
        return self.weight_bytes + self.sleeping_bytes + self.kv_bytes

    @property
    def in_words(self) -> str:
        """Its use as text: `40.0 GiB weights, 12.0 GiB asleep`."""
        parts = {"weights": self.weight_bytes, "asleep": self.sleeping_bytes, "KV pages": self.kv_bytes}
        parts["page-locked"] = self.locked_bytes
        return ", ".join(f"{size(num_bytes)} {name}" for name, num_bytes in parts.items() if num_bytes)


class HeldModel(ModelStatus, frozen=True, kw_only=True):
    """A model on a node: the node's report, and what the gateway adds."""

    in_flight: int = 0
    pinned: bool = False
    pinned_by: Literal["operator", "catalogue"] | None = None

    @property
    def num_running(self) -> int:
        """By the node's report, or by what the gateway has sent since; without requests that wait there."""
        return max(self.load.running, self.in_flight - self.load.waiting)


class NodeView(NodeValue, frozen=True, kw_only=True):
    name: str
    kind: str
    up: bool
    draining: bool = False
    drained: bool = False
    sleep: str = "awake"
    """`asleep`, `waking`, `suspending` or `lost`, for a node that the gateway has suspended."""
    watts: float | None = None
    """Power draw of its devices and processor packages."""
    problem: str | None = None
    ceiling_bytes: int | None = None
    """Ceiling for models over all devices."""
    host: HostView | None = None
    devices: tuple[DeviceView, ...] = ()
    models: tuple[HeldModel, ...] = ()
    cold_models: tuple[str, ...] = ()
    cold_reasons: dict[str, str] = msgspec.field(default_factory=dict)
    """Models whose last load failed there, or that it lost → why."""
    absent_models: dict[str, str] = msgspec.field(default_factory=dict)
    """Models whose files are missing or damaged there → why."""
    members: tuple[ModelStatus, ...] = ()
    """Parts of models that other nodes serve."""
    files: dict[str, int] = msgspec.field(default_factory=dict)
    """Bytes on disk, by model."""

    @property
    def is_reserve(self) -> bool:
        """Whether it sleeps and is woken when needed."""
        return self.sleep in RESERVES


class FleetView(NodeValue, frozen=True, kw_only=True):
    version: str
    nodes: tuple[NodeView, ...]
    waiting: dict[str, int] = msgspec.field(default_factory=dict)
    """Number of waiting requests, by model."""
    waiting_reasons: dict[str, str] = msgspec.field(default_factory=dict)
    """What they wait for, where a decision says it."""

    def places(self, model: str) -> Iterator[tuple[NodeView, HeldModel]]:
        """The nodes that hold a model, in any state but cold."""
        for node in self.nodes:
            for held in node.models:
                if held.id == model:
                    yield node, held


def missing_files(listed: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Why no node has the files of a model, for each node; `listed`: as `/v1/models` lists them."""
    for entry in listed:
        if not entry.get("feasible_on") and "alias_of" not in entry:
            for node, reason in entry.get("problems", {}).items():
                yield f"{entry['id']} on {node}: {without_name(entry['id'], reason)}"


def failed_loads(listed: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Models that no node serves, with the reason of each node where a load failed."""
    for entry in listed:
        if not entry.get("loaded") and "alias_of" not in entry:
            for node, reason in entry.get("failures", {}).items():
                yield f"{entry['id']} on {node}: {without_name(entry['id'], reason)}"


def without_name(model: str, reason: str) -> str:
    """A model's reason without its name, for a line that begins with the name."""
    return reason.removeprefix(f"{model}: ")


def fetch(gateway: GatewayClient) -> FleetView:
    """The present state of the fleet. Raises `CommandError`."""
    return parse(gateway.get("/fleet/status"))


def parse(value: Any) -> FleetView:
    return msgspec.convert(value, FleetView)
