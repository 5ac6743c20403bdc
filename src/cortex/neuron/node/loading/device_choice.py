"""Which devices a load takes, and which layers go to each if the model is divided by layers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cortex.neuron.engine.request import StageSpec
from cortex.neuron.node.loading.forecast import Forecast
from cortex.neuron.node.loading.library import KnownModel
from cortex.neuron.node.loading.preflight import ModelFacts, choose_devices, device_row, gigabytes, usable_now
from cortex.neuron.node.memory_ceilings import smallest
from cortex.neuron.worker.discovery import DeviceReading
from cortex.wire.errors import InsufficientCapacity, LoadFailed
from cortex.wire.node import Device
from cortex.wire.words import plural

DeviceLimit = Callable[[Device], int | None]
"""Bytes of a device; None: no limit."""


@dataclass(frozen=True, slots=True)
class ChosenDevices:
    devices: tuple[Device, ...]
    """By index."""
    stages: tuple[StageSpec, ...] = ()
    """Of each replica, if the model is divided by layers."""
    free_bytes: tuple[int, ...] = ()
    """What each device can give, if the layers are divided among nodes: their lead decides."""
    limits: tuple[int | None, ...] = ()
    """The operator's ceiling of each device then."""

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(device.index for device in self.devices)


def _check_stages(model: KnownModel, facts: ModelFacts, device: Device, forecast: Forecast) -> None:
    """Raises LoadFailed for a model that cannot be divided so, however much memory is free."""
    num_layers = facts.architecture.config.num_layers
    if model.pipeline_parallel > num_layers:
        raise LoadFailed(
            f"{model.id} has {num_layers} layers, too few for pipeline_parallel = {model.pipeline_parallel}; lower it"
        )
    need_bytes = forecast.smallest_bytes(model, facts, device)
    if model.memory_bytes is not None and model.memory_bytes < need_bytes:
        raise LoadFailed(
            f"{model.id} needs {gigabytes(need_bytes)}, but may take {gigabytes(model.memory_bytes)} (memory_mb); "
            "raise it, or choose a smaller or more strongly quantised model"
        )


def check_devices(model: KnownModel, devices: Sequence[Device]) -> None:
    """Raises LoadFailed for a division that this node cannot make, or devices that it does not have."""
    allowed = len(set(model.devices)) if model.devices else len(devices)
    division = f"tensor_parallel = {model.tensor_parallel}"
    if model.pipeline_parallel > 1:
        division = f"pipeline_parallel = {model.pipeline_parallel}"
    if model.num_devices > allowed:
        replicas = "" if model.replicas == 1 else f" and replicas = {model.replicas}"
        raise LoadFailed(
            f"{model.id} asks for {division}{replicas}, but may use {plural(allowed, 'device')} of this node; lower "
            "it, or choose a model that fits fewer devices"
        )
    if model.deterministic and model.is_divided:
        raise LoadFailed(
            f"{model.id} asks for deterministic = true and {division}, but only a model on one device computes every "
            "step in the same way; leave one of them out"
        )
    indices = [device.index for device in devices]
    for index in model.devices:
        if index not in indices:
            have = ", ".join(map(str, indices))
            raise LoadFailed(f"{model.id} asks for device {index}, but this node has {have}; choose one of them")


def choose(
    model: KnownModel,
    facts: ModelFacts,
    devices: Sequence[Device],
    readings: Mapping[int, DeviceReading],
    forecast: Forecast,
    *,
    excluded: Mapping[int, str] | None = None,
    left: DeviceLimit = lambda _: None,
) -> ChosenDevices:
    """The devices with room for the model, as many as it takes. `excluded`: devices that it cannot use, and why;
    `left`: what other models leave of the operator's ceilings. Raises InsufficientCapacity or LoadFailed."""
    excluded = excluded or {}
    if not devices:
        raise InsufficientCapacity(f"{model.id} has no device to be loaded on")
    if model.pipeline_parallel > 1 and not model.nodes:
        return _choose_stages(model, facts, devices, readings, forecast, excluded, left)
    # How many layers a device of several nodes gets follows from what all of them can give.
    if model.pipeline_parallel > 1:
        _check_stages(model, facts, devices[0], forecast)
    need_bytes = 0 if model.pipeline_parallel > 1 else forecast.least_bytes(model, facts, devices[0])
    indices = choose_devices(
        model.id,
        need_bytes,
        devices,
        readings,
        count=model.num_devices,
        allowed=model.devices,
        excluded=excluded,
        reserve=forecast.reserve,
        ceiling=lambda device: forecast.share_bytes(model, device),
        left=left,
    )
    chosen = tuple(device for device in devices if device.index in indices)
    if model.pipeline_parallel == 1:
        return ChosenDevices(chosen)
    limits = tuple(map(left, chosen))
    free_bytes = tuple(
        usable_now(readings.get(device.index), forecast.reserve(device), limit)
        for device, limit in zip(chosen, limits, strict=True)
    )
    return ChosenDevices(chosen, free_bytes=free_bytes, limits=limits)


def _choose_stages(
    model: KnownModel,
    facts: ModelFacts,
    devices: Sequence[Device],
    readings: Mapping[int, DeviceReading],
    forecast: Forecast,
    excluded: Mapping[int, str],
    left: DeviceLimit,
) -> ChosenDevices:
    """The devices with the most free memory, as many as the model takes, and the layers of each. Replicas have the same
    stages: for each stage, the device with the least free memory among the replicas decides.

    Raises LoadFailed, or InsufficientCapacity with the needed bytes and the available bytes of every device.
    """
    _check_stages(model, facts, devices[0], forecast)
    allowed = [
        device
        for device in devices
        if device.index in readings
        and device.index not in excluded
        and (not model.devices or device.index in model.devices)
    ]
    ceilings = {device.index: left(device) for device in allowed}
    free_bytes = {
        device.index: usable_now(readings[device.index], forecast.reserve(device), ceilings[device.index])
        for device in allowed
    }
    emptiest = sorted(free_bytes, key=lambda index: (-free_bytes[index], index))[: model.num_devices]
    chosen = tuple(sorted(emptiest))
    stages = None
    if len(chosen) == model.num_devices:
        size = model.pipeline_parallel
        columns = [[chosen[start + stage] for start in range(0, len(chosen), size)] for stage in range(size)]
        capacities = [min(free_bytes[index] for index in column) for column in columns]
        limits = [smallest(*(ceilings[index] for index in column)) for column in columns]
        stages = forecast.stages(model, facts, devices[0], capacities, limits)
    if stages is not None:
        return ChosenDevices(tuple(device for device in allowed if device.index in chosen), stages)
    raise _no_room(model, facts, devices, readings, forecast, excluded, left, chosen)


def _no_room(
    model: KnownModel,
    facts: ModelFacts,
    devices: Sequence[Device],
    readings: Mapping[int, DeviceReading],
    forecast: Forecast,
    excluded: Mapping[int, str],
    left: DeviceLimit,
    chosen: tuple[int, ...],
) -> InsufficientCapacity:
    least_bytes = forecast.least_bytes(model, facts, devices[0])
    share_bytes = -(-least_bytes // model.pipeline_parallel)
    fits_when_empty = forecast.empty_stages(model, facts, devices) is not None
    table: list[dict[str, Any]] = []
    for device in devices:
        if model.devices and device.index not in model.devices:
            reason = "not among the requested devices"
        elif device.index in excluded:
            reason = excluded[device.index]
        elif device.index not in readings:
            reason = "the device does not respond"
        elif not fits_when_empty:
            reason = "too small even when empty, or under memory_mb"
        elif device.index in chosen:
            reason = "too little is free; unload something"
        else:
            reason = "has less than the others"
        reading, kept = readings.get(device.index), forecast.reserve(device)
        ceiling_bytes = forecast.share_bytes(model, device)
        table.append(device_row(device, reading, kept, share_bytes, reason, ceiling_bytes, left(device)))
    rows = "; ".join(
        f"device {row['device']} ({row['name']}) has {gigabytes(row['have_bytes'])} to give: {row['reason']}"
        for row in table
    )
    return InsufficientCapacity(
        f"{model.id} needs at least {gigabytes(least_bytes)} for its {facts.architecture.config.num_layers} layers on "
        f"{model.pipeline_parallel} devices, the first of which also holds embedding and head, but {rows}",
        details={"devices": table},
    )
