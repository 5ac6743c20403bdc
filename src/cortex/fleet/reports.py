"""Applies polls: the node after a report, or after a missed one."""

from __future__ import annotations

import msgspec

from cortex.wire.node.protocol import Device, DeviceHealth, Discovery, Health, ModelState, ModelStatus

from .devices import Ceilings, DeviceState, bytes_held
from .topology import Node, Residency

_CHANGING_MEMORY = frozenset({ModelState.LOADING, ModelState.UNLOADING, ModelState.RECOVERING})
"""States in which the free bytes of a device change."""
_LOADED = frozenset({ModelState.READY, ModelState.UNLOADING})


def after_poll(before: Node, discovery: Discovery, health: Health, now: float) -> Node:
    """The node after a successful poll. Reservations and counters of the gateway are carried over."""
    return msgspec.structs.replace(
        before,
        devices=_devices(before, discovery, health),
        ceiling_bytes=_smaller(before.ceilings.node_bytes, health.ceiling_bytes),
        residencies={status.id: _residency(before, status, now) for status in health.models if not status.rank},
        max_devices_per_model=discovery.max_devices_per_model,
        can_sleep=discovery.can_sleep,
        harnesses=discovery.harnesses,
        group_harnesses=discovery.group_harnesses,
        abilities=msgspec.structs.replace(before.abilities, dialects=discovery.dialects),
        healthy=True,
        draining=health.status == "draining",
        missed_polls=0,
        problem=discovery.driver_problem,
        disk=health.disk,
        host=health.host,
        watts=health.watts,
        pulls=health.pulls,
        members=tuple(status for status in health.models if status.rank),
    )


def _residency(before: Node, status: ModelStatus, now: float) -> Residency:
    """The status keeps its age if the node did not resend it because nothing changed."""
    known = before.residencies.get(status.id)
    return known if known is not None and known.status is status else Residency(status=status, seen_at=now)


def after_missed_poll(node: Node, reason: str, *, limit: int) -> Node:
    """The node after a failed poll. It stays healthy until `limit` consecutive polls have failed: a busy node responds
    late, and moving its work would make that worse."""
    count = node.missed_polls + 1
    if count < limit:
        return msgspec.structs.replace(node, missed_polls=count)
    return msgspec.structs.replace(node, missed_polls=count, healthy=False, problem=reason)


def _devices(before: Node, discovery: Discovery, health: Health) -> tuple[DeviceState, ...]:
    reports = {report.index: report for report in health.devices}
    known = {device.index: device for device in before.devices}
    return tuple(
        _device(device, reports.get(device.index), known.get(device.index), health.models, before.ceilings)
        for device in discovery.devices
    )


def _device(
    device: Device,
    report: DeviceHealth | None,
    known: DeviceState | None,
    models: tuple[ModelStatus, ...],
    ceilings: Ceilings,
) -> DeviceState:
    total_bytes = report.total_bytes if report else device.total_bytes
    free_bytes = report.free_bytes if report else device.total_bytes
    here = [status for status in models if device.index in status.devices]
    if known is not None and any(status.state in _CHANGING_MEMORY for status in here):
        foreign_bytes = known.foreign_bytes
    else:
        ours = sum(bytes_held(device.index, device.kind, status) for status in here)
        if device.kind == "cpu" and report is not None:
            ours += report.kv_host_bytes + sum(status.host_bytes for status in here if status.state in _LOADED)
        foreign_bytes = max(0, total_bytes - free_bytes - ours)
    return DeviceState(
        index=device.index,
        kind=device.kind,
        name=device.name,
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        foreign_bytes=foreign_bytes,
        kept_free_bytes=report.kept_free_bytes if report else 0,
        kept_free_share=report.kept_free_share if report else 0.0,
        ceiling_bytes=_smaller(ceilings.device_bytes.get(device.index), report.ceiling_bytes if report else None),
        extra_replica_bytes=report.extra_replica_bytes if report else 0,
        kv_host_bytes=report.kv_host_bytes if report else 0,
        utilisation=report.utilisation if report else None,
        temperature_c=report.temperature_c if report else None,
        watts=report.watts if report else None,
    )


def _smaller(one: int | None, other: int | None) -> int | None:
    return min((limit for limit in (one, other) if limit is not None), default=None)
