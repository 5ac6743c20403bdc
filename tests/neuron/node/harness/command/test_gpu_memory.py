"""The GPU memory of processes, with a driver that the test decides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pynvml import NVMLError

from cortex.neuron.node.harness.command import process_memory
from cortex.wire.node.protocol import Device

DEVICES = tuple(Device(index=index, kind="cuda", name="card", total_bytes=1 << 34) for index in range(2))


class Driver:
    """Processes and their memory, by device."""

    def __init__(self, *held: dict[int, int | None]) -> None:
        self.held = held
        self.num_sessions = 0

    def nvmlInit(self) -> None:  # noqa: N802 - as the library has it
        self.num_sessions += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.num_sessions -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        if handle >= len(self.held):
            raise NVMLError(1)
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.held[handle].items()]


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        (({7: 100, 8: 20, 9: 3}, {8: 4}), 124),
        (({9: 3}, {}), None),
        (({7: None}, {8: 4}), None),
        (({7: 100},), None),
    ],
)
def test_memory_of_the_processes_of_a_server(
    monkeypatch: pytest.MonkeyPatch, held: tuple[dict[int, int | None], ...], expected: int | None
) -> None:
    driver = Driver(*held)
    monkeypatch.setattr(process_memory, "_library", driver)
    assert process_memory.gpu_bytes(DEVICES, [7, 8]) == expected
    assert driver.num_sessions == 0


def test_without_a_driver_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise NVMLError(1)

    monkeypatch.setattr(process_memory, "_library", SimpleNamespace(nvmlInit=fails))
    assert process_memory.gpu_bytes(DEVICES, [7]) is None
