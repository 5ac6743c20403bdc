"""The fleet's numbers at the moment of a scrape."""

from __future__ import annotations

from collections.abc import Iterator

from cortex.fleet.topology import Residency
from cortex.gateway.dispatch.dispatcher import Dispatcher
from cortex.gateway.metrics import GaugeSample
from cortex.wire.node import DeviceHealth, ModelState


def samples(dispatcher: Dispatcher, device_health: dict[str, tuple[DeviceHealth, ...]]) -> Iterator[GaugeSample]:
    """Every gauge of every node, device and model that is not cold."""
    held_somewhere = {
        held.model_id for node in dispatcher.fleet.nodes for held in node.residencies.values() if _is_held(held)
    }
    for model, depth in (dict.fromkeys(held_somewhere, 0) | dispatcher.queue_depths).items():
        yield GaugeSample("cortex_queue_depth", depth, model=model)
    for (node_name, model), count in dispatcher.in_flight.items():
        yield GaugeSample("cortex_in_flight_requests", count, model=model, node=node_name)
    for node in dispatcher.fleet.nodes:
        yield GaugeSample("cortex_node_up", float(node.healthy), node=node.name)
        if not node.healthy:
            continue
        for report in device_health.get(node.name, ()):
            yield from _device(node.name, report)
        for held in node.residencies.values():
            if not _is_held(held):
                continue
            labels = {"model": held.model_id, "node": node.name}
            load = held.status.load
            yield GaugeSample("cortex_model_loaded", float(held.state is ModelState.READY), **labels)
            on_device = 0 if held.state is ModelState.ASLEEP else held.status.measured_bytes or 0
            yield GaugeSample("cortex_model_memory_bytes", on_device, **labels)
            yield GaugeSample("cortex_model_sleeping_bytes", held.status.host_bytes, **labels)
            yield GaugeSample("cortex_model_running_requests", load.running, **labels)
            yield GaugeSample("cortex_model_waiting_requests", load.waiting, **labels)
            yield GaugeSample("cortex_model_kv_used_ratio", load.kv_used_fraction, **labels)


def _is_held(held: Residency) -> bool:
    return held.state is not ModelState.COLD


def _device(node: str, report: DeviceHealth) -> Iterator[GaugeSample]:
    labels = {"node": node, "device": str(report.index)}
    yield GaugeSample("cortex_device_memory_total_bytes", report.total_bytes, **labels)
    yield GaugeSample("cortex_device_memory_free_bytes", report.free_bytes, **labels)
    if report.utilisation is not None:
        yield GaugeSample("cortex_device_utilisation_ratio", report.utilisation, **labels)
    if report.temperature_c is not None:
        yield GaugeSample("cortex_device_temperature_celsius", report.temperature_c, **labels)
