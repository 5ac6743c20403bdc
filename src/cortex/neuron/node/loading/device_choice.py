"""Which devices a load takes, and which layers go to each if the model is divided by layers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cortex.neuron.engine.request import StageSpec
from cortex.neuron.node.loading.forecast import Forecast
from cortex.neuron.node.loading.library import KnownModel
from cortex.neuron.node.loading.preflight import ModelFacts, choose_devices, device_row, gigabytes
from cortex.neuron.worker.discovery import DeviceReading
from cortex.wire.errors import InsufficientCapacity, LoadFailed
from cortex.wire.node import Device


@dataclass(frozen=True, slots=True)
class ChosenDevices:
    indices: tuple[int, ...]
    """In order."""
    stages: tuple[StageSpec, ...] = ()
    """Of each replica, if the model is divided by layers."""


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
            f"{model.id} needs {gigabytes(need_bytes)}, but memory_mb allows {gigabytes(model.memory_bytes)}; raise "
            "it, or choose a smaller or more strongly quantised model"
        )


def check_devices(model: KnownModel, devices: Sequence[Device]) -> None:
    """Raises LoadFailed for devices that this node does not have."""
    allowed = len(set(model.devices)) if model.devices else len(devices)
    if model.num_devices > allowed:
        replicas = "" if model.replicas == 1 else f" and replicas = {model.replicas}"
        division = f"tensor_parallel = {model.tensor_parallel}"
        if model.pipeline_parallel > 1:
            division = f"pipeline_parallel = {model.pipeline_parallel}"
        raise LoadFailed(
            f"{model.id} asks for {division}{replicas}, but may use {allowed} device{'' if allowed == 1 else 's'} of "
            "this node; lower it, or choose a model that fits fewer devices"
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
) -> ChosenDevices:
    """The devices with room for the model, as many as it takes. Raises InsufficientCapacity or LoadFailed."""
    if not devices:
        raise InsufficientCapacity(f"{model.id} has no device to be loaded on")
    if model.pipeline_parallel > 1:
        return choose_stages(model, facts, devices, readings, forecast)
    indices = choose_devices(
        model.id,
        forecast.least_bytes(model, facts, devices[0]),
        devices,
        readings,
        count=model.num_devices,
        allowed=model.devices,
        reserve=forecast.reserve,
    )
    return ChosenDevices(indices)


def choose_stages(
    model: KnownModel,
    facts: ModelFacts,
    devices: Sequence[Device],
    readings: Mapping[int, DeviceReading],
    forecast: Forecast,
) -> ChosenDevices:
    """The devices with the most free memory, as many as the model takes, and the layers of each. Replicas have the same
    stages: for each stage, the device with the least free memory among the replicas decides.

    Raises LoadFailed, or InsufficientCapacity with the needed bytes and the available bytes of every device.
    """
    _check_stages(model, facts, devices[0], forecast)
    free_bytes: dict[int, int] = {}
    for device in devices:
        reading = readings.get(device.index)
        if reading is not None and (not model.devices or device.index in model.devices):
            free_bytes[device.index] = max(0, forecast.reserve(device).usable_bytes(reading.free_bytes))
    emptiest = sorted(free_bytes, key=lambda index: (-free_bytes[index], index))[: model.num_devices]
    chosen = tuple(sorted(emptiest))
    size = model.pipeline_parallel
    stages = None
    if len(chosen) == model.num_devices:
        parts = [chosen[start : start + size] for start in range(0, len(chosen), size)]
        capacities = [min(free_bytes[index] for index in column) for column in zip(*parts, strict=True)]
        stages = forecast.stages(model, facts, devices[0], capacities)
    if stages is not None:
        return ChosenDevices(chosen, stages)
    raise _no_room(model, facts, devices, readings, forecast, chosen)


def _no_room(
    model: KnownModel,
    facts: ModelFacts,
    devices: Sequence[Device],
    readings: Mapping[int, DeviceReading],
    forecast: Forecast,
    chosen: tuple[int, ...],
) -> InsufficientCapacity:
    least_bytes = forecast.least_bytes(model, facts, devices[0])
    fits_when_empty = forecast.empty_stages(model, facts, devices) is not None
    table: list[dict[str, Any]] = []
    for device in devices:
        if model.devices and device.index not in model.devices:
            reason = "not among the requested devices"
        elif device.index not in readings:
            reason = "the device does not respond"
        elif not fits_when_empty:
            reason = "too small even when empty"
        elif device.index in chosen:
            reason = "too little is free; unload something"
        else:
            reason = "has less than the others"
        need_bytes = -(-least_bytes // model.pipeline_parallel)
        table.append(device_row(device, readings.get(device.index), forecast.reserve(device), need_bytes, reason))
    rows = "; ".join(
        f"device {row['device']} ({row['name']}) has {gigabytes(row['have_bytes'])} to give: {row['reason']}"
        for row in table
    )
    return InsufficientCapacity(
        f"{model.id} needs at least {gigabytes(least_bytes)} for its {facts.architecture.config.num_layers} layers on "
        f"{model.pipeline_parallel} devices, the first of which also holds embedding and head, but {rows}",
        details={"devices": table},
    )
