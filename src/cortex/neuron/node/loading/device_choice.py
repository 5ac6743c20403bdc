"""The devices of a load on this node: those that the request names if they still have room, else the choice of the rule
that placement uses (`wire/node/device_choice.py`); and the layers of each if the model is divided by layers. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cortex.formats.units import gib
from cortex.neuron.engine.memory.reserve import MemoryReserve
from cortex.neuron.node.harness.estimates import Estimates, FileMetadata
from cortex.neuron.node.library import KnownModel
from cortex.neuron.node.memory.allocation import ChosenDevices
from cortex.neuron.node.memory.ceilings import smallest
from cortex.neuron.worker.discovery import DeviceReading
from cortex.wire.errors import InsufficientCapacity, LoadFailed, ModelUnsupported
from cortex.wire.node.device_choice import UNPLACED, Division, choose_devices
from cortex.wire.node.host_splits import HostSplit
from cortex.wire.node.protocol import Device
from cortex.wire.words import plural

_UNKNOWN_BYTES = 1 << 20
"""What a load of unknown size needs at least."""
_SLACK = 64
_SEQUENCES = (4, 8, 16, 32)
"""The engine reserves at most a quarter of the device for sequences of a divided model rather than for weights."""

DeviceLimit = Callable[[Device], int | None]
"""Bytes of a device; None without a limit."""


def check_devices(model: KnownModel, devices: Sequence[Device]) -> None:
    """Raises ModelUnsupported for a division that this node cannot make, or devices that it does not have."""
    allowed = len(set(model.devices)) if model.devices else len(devices)
    division = f"tensor_parallel = {model.tensor_parallel}"
    if model.pipeline_parallel > 1:
        division = f"pipeline_parallel = {model.pipeline_parallel}"
    if model.num_devices > allowed:
        replicas = "" if model.replicas == 1 else f" and replicas = {model.replicas}"
        raise ModelUnsupported(
            f"{model.id} asks for {division}{replicas}, but may use {plural(allowed, 'device')} of this node; lower "
            "it, or choose a model that fits fewer devices"
        )
    if model.deterministic and model.is_divided:
        raise ModelUnsupported(
            f"{model.id} asks for deterministic = true and {division}, but only a model on one device computes every "
            "step in the same way; leave one of them out"
        )
    indices = [device.index for device in devices]
    for index in model.devices:
        if index not in indices:
            have = ", ".join(map(str, indices))
            raise ModelUnsupported(f"{model.id} asks for device {index}, but this node has {have}; choose one of them")


def capacity_bytes(model: KnownModel, devices: Sequence[Device], estimates: Estimates) -> int:
    """Bytes that a load may take of the largest of `devices` that it may use, if they are empty."""
    allowed = [device for device in devices if not model.devices or device.index in model.devices]
    usable = (
        smallest(estimates.reserve(device).usable_bytes(device.total_bytes), estimates.share_bytes(model, device)) or 0
        for device in allowed
    )
    return sum(sorted(usable, reverse=True)[: model.num_devices])


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The inputs of a choice of devices."""

    model: KnownModel
    metadata: FileMetadata
    devices: Sequence[Device]
    readings: Mapping[int, DeviceReading]
    forecast: Estimates
    excluded: Mapping[int, str] = field(default_factory=dict)
    """Devices that the model cannot use, and why."""
    left: DeviceLimit = lambda _: None
    """Bytes that other models leave under the operator's ceilings."""

    def choose(self) -> ChosenDevices:
        """The devices for the model, each with room. Raises InsufficientCapacity or LoadFailed."""
        model = self.model
        if not self.devices:
            raise InsufficientCapacity(f"{model.id} has no device to be loaded on")
        if model.pipeline_parallel > 1:
            self._check_stages()
            return self._choose_stages()
        need_bytes = self._need_bytes()
        self._check_own_limit(need_bytes)
        objections = {device.index: self._objection(device, need_bytes) for device in self.devices}
        have = {each.index: self.usable_bytes(each) for each in self.devices if objections[each.index] is None}
        indices = choose_devices(Division(model.num_devices * need_bytes, model.num_devices), have, UNPLACED)
        if not indices:
            raise self._too_small(need_bytes, objections)
        chosen = tuple(device for device in self.devices if device.index in indices)
        return ChosenDevices(chosen, limits=tuple(map(self.left, chosen)))

    def _objection(self, device: Device, need_bytes: int) -> str | None:
        """Why `need_bytes` do not fit the device; None if they do."""
        if (unusable := self._why_unusable(device)) is not None:
            return unusable
        ceiling_bytes, left_bytes = self.forecast.share_bytes(self.model, device), self.left(device)
        if need_bytes > self.forecast.reserve(device).usable_bytes(device.total_bytes):
            return "too small even when empty"
        if ceiling_bytes is not None and need_bytes > ceiling_bytes:
            return f"models may take {gib(ceiling_bytes)} of it (memory_mb)"
        if left_bytes is not None and need_bytes > left_bytes:
            return "other models take the rest of memory_mb; unload something, or raise it"
        return "too little is free; unload something" if need_bytes > self.usable_bytes(device) else None

    def _too_small(self, need_bytes: int, objections: Mapping[int, str | None]) -> InsufficientCapacity:
        """The error with the needed and the available bytes of every device that does not fit."""
        reasons = {device: reason for device in self.devices if (reason := objections[device.index]) is not None}
        table = [self._row(device, need_bytes, reason) for device, reason in reasons.items()]
        rows = "; ".join(
            f"device {row['device']} ({row['name']}) has {gib(row['have_bytes'])} of "
            f"{gib(row['total_bytes'])} to give, in addition to {gib(row['kept_free_bytes'])} kept free: "
            f"{row['reason']}"
            for row in table
        )
        count = self.model.num_devices
        each = "" if count == 1 else f" on each of {count} devices"
        return InsufficientCapacity(
            f"{self.model.id} needs at least {gib(need_bytes)}{each}{self._purpose}, but {rows}",
            details={"devices": table},
        )

    def _row(self, device: Device, need_bytes: int, reason: str) -> dict[str, Any]:
        """Why a device does not fit, for the details of an error."""
        reading = self.readings.get(device.index)
        return {
            "device": device.index,
            "name": device.name,
            "need_bytes": need_bytes,
            "have_bytes": self.usable_bytes(device),
            "kept_free_bytes": self.forecast.reserve(device).bytes_of(0 if reading is None else reading.free_bytes),
            "ceiling_bytes": self.forecast.share_bytes(self.model, device),
            "total_bytes": device.total_bytes,
            "reason": reason,
        }

    def _why_unusable(self, device: Device) -> str | None:
        """Why a load cannot use the device, regardless of its free memory; None if it can."""
        if self.model.devices and device.index not in self.model.devices:
            return "not among the requested devices"
        is_silent = device.index not in self.readings
        return self.excluded.get(device.index, "the device does not respond" if is_silent else None)

    def _check_own_limit(self, need_bytes: int) -> None:
        """Raises InsufficientCapacity for a model that fits under its own limit only with weights in host memory."""
        model = self.model
        if model.memory_bytes is not None and need_bytes > model.memory_bytes and isinstance(self.split(), HostSplit):
            raise InsufficientCapacity(
                f"{model.id} needs at least {gib(need_bytes)}{self._purpose}, but may take {gib(model.memory_bytes)} "
                "(memory_mb)"
            )

    def split(self, host_bytes: int = 0) -> HostSplit | str:
        """The weights that must go to host memory so that the rest fits the devices with the most free memory; or why
        that is impossible. `host_bytes`: free host memory. The load may move more than it must, as the engine makes
        room for sequences."""
        model = self.model
        have = sorted(
            (self.usable_bytes(device) for device in self.devices if self._why_unusable(device) is None),
            reverse=True,
        )[: model.num_devices]
        if len(have) < model.num_devices:
            return f"{plural(len(have), 'device')} can be used"
        have_bytes = sum(have) if model.pipeline_parallel > 1 else have[-1]
        limit_bytes = None if model.memory_bytes is None else model.memory_bytes // self.metadata.num_ranks
        have_bytes, device = smallest(have_bytes, limit_bytes) or 0, self.devices[0]
        lacking_bytes = max(1, self._need_bytes() - have_bytes)
        # Free memory changes a little until the load begins.
        least = self.forecast.split(model, self.metadata, device, lacking_bytes + lacking_bytes // _SLACK)
        if isinstance(least, str) or least.host_bytes > host_bytes:
            return least
        for part in _SEQUENCES:
            more = self.forecast.split(model, self.metadata, device, lacking_bytes + have_bytes // part)
            if isinstance(more, HostSplit):
                return msgspec.structs.replace(
                    least, host_bytes=max(least.host_bytes, min(host_bytes, more.host_bytes))
                )
        return least

    def _need_bytes(self) -> int:
        """The least memory of each device, or of all if the layers are divided; positive for a model of unknown
        size."""
        device, tokens = self.devices[0], self.model.min_context_tokens
        if tokens is None:
            return self.forecast.least_bytes(self.model, self.metadata, device) or _UNKNOWN_BYTES
        return self.forecast.context_bytes(self.model, self.metadata, device, tokens)

    @property
    def _purpose(self) -> str:
        """The purpose of the memory, for errors."""
        tokens = self.model.min_context_tokens
        return "" if tokens is None or tokens == 1 else f" for a context of {tokens:,} tokens"

    def usable_bytes(self, device: Device) -> int:
        """Bytes that a load may take of a device."""
        return usable_now(self.readings.get(device.index), self.forecast.reserve(device), self.left(device))

    def _check_stages(self) -> None:
        """Raises LoadFailed for a model that cannot be divided like this, even if all memory were free."""
        model, num_layers, most_stages = self.model, self.metadata.num_layers, self.metadata.most_stages
        if not self.metadata.has_stages:
            raise ModelUnsupported(
                f"{model.id} cannot be divided by layers, because the {self.metadata.backend} library runs it; "
                "use tensor_parallel instead of pipeline_parallel, or one device"
            )
        if model.pipeline_parallel > num_layers:
            raise ModelUnsupported(
                f"{model.id} has {num_layers} layers, too few for pipeline_parallel = {model.pipeline_parallel}; "
                "lower it"
            )
        if model.pipeline_parallel > most_stages:
            advice = "use tensor_parallel, or one device" if most_stages == 1 else f"at most {most_stages} are possible"
            raise ModelUnsupported(
                f"{model.id} has {num_layers} layers, and some share keys and values or pictures and must be on "
                f"one device: pipeline_parallel = {model.pipeline_parallel} is too many; {advice}"
            )
        need_bytes = self.forecast.smallest_bytes(model, self.metadata, self.devices[0])
        if model.memory_bytes is not None and model.memory_bytes < need_bytes:
            raise LoadFailed(
                f"{model.id} needs {gib(need_bytes)}, but may take {gib(model.memory_bytes)} (memory_mb); "
                "raise it, or choose a smaller or more strongly quantised model"
            )

    def _choose_stages(self) -> ChosenDevices:
        """The devices with the most free memory, as many as the model takes, and the layers of each. Replicas have the
        same stages: for each stage, the device with the least free memory among the replicas decides.

        Raises InsufficientCapacity with the needed bytes and the available bytes of every device.
        """
        model = self.model
        allowed = [device for device in self.devices if self._why_unusable(device) is None]
        ceilings = {device.index: self.left(device) for device in allowed}
        free_bytes = {device.index: self.usable_bytes(device) for device in allowed}
        chosen = choose_devices(Division(0, model.num_devices, by_layers=True), free_bytes, UNPLACED)
        stages = None
        if chosen:
            size = model.pipeline_parallel
            columns = [[chosen[start + stage] for start in range(0, len(chosen), size)] for stage in range(size)]
            capacities = [min(free_bytes[index] for index in column) for column in columns]
            limits = [smallest(*(ceilings[index] for index in column)) for column in columns]
            stages = self.forecast.stages(model, self.metadata, self.devices[0], capacities, limits)
        need_bytes = 0 if model.min_context_tokens is None else model.replicas * self._need_bytes()
        if stages is not None and sum(free_bytes[index] for index in chosen) >= need_bytes:
            devices = tuple(device for device in allowed if device.index in chosen)
            return ChosenDevices(devices, stages, limits=tuple(ceilings[index] for index in chosen))
        raise self._no_room(chosen)

    def _no_room(self, chosen: tuple[int, ...]) -> InsufficientCapacity:
        model, num_layers = self.model, self.metadata.num_layers
        least_bytes = self._need_bytes()
        share_bytes = -(-least_bytes // model.pipeline_parallel)
        fits_when_empty = self.forecast.empty_stages(model, self.metadata, self.devices) is not None
        table: list[dict[str, Any]] = []
        for device in self.devices:
            if (unusable := self._why_unusable(device)) is not None:
                reason = unusable
            elif not fits_when_empty:
                reason = "too small even when empty, or under memory_mb"
            elif device.index in chosen or not chosen:
                reason = "too little is free; unload something"
            else:
                reason = "has less than the others"
            table.append(self._row(device, share_bytes, reason))
        rows = "; ".join(
            f"device {row['device']} ({row['name']}) has {gib(row['have_bytes'])} to give: {row['reason']}"
            for row in table
        )
        return InsufficientCapacity(
            f"{model.id} needs at least {gib(least_bytes)}{self._purpose} for its {num_layers} layers on "
            f"{model.pipeline_parallel} devices, the first of which also holds embedding and head, but {rows}",
            details={"devices": table},
        )


def usable_now(reading: DeviceReading | None, kept: MemoryReserve, left_bytes: int | None) -> int:
    """Bytes that a load may take of a device. `left_bytes`: what other models leave of the operator's ceiling."""
    have_bytes = 0 if reading is None else max(0, kept.usable_bytes(reading.free_bytes))
    return have_bytes if left_bytes is None else min(have_bytes, left_bytes)
