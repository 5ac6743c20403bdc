"""The GPU memory of processes, with a driver that the test decides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pynvml import NVMLError

from cortex.neuron.node.harness.command.process_memory import gpu_bytes
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
def test_memory_of_the_processes_of_a_server(held: tuple[dict[int, int | None], ...], expected: int | None) -> None:
    driver = Driver(*held)
    assert gpu_bytes(DEVICES, [7, 8], driver) == expected
    assert driver.num_sessions == 0


def test_without_a_driver_nothing_is_known() -> None:
    def fails() -> None:
        raise NVMLError(1)

    assert gpu_bytes(DEVICES, [7], SimpleNamespace(nvmlInit=fails)) is None
