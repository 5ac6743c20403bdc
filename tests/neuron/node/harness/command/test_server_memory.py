"""Which processes count as those of a server, and their GPU memory, with a driver that the test decides."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pynvml import NVMLError

from cortex.neuron.node.harness.command.server_process import descendants, gpu_bytes
from cortex.wire.node.protocol import Device

DEVICES = tuple(Device(index=index, kind="cuda", name="card", total_bytes=1 << 34) for index in range(2))


def test_thread_that_ends_meanwhile_hides_no_child_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for thread, children in (("7", ""), ("8", None), ("9", "70 71")):
        folder = tmp_path / "7" / "task" / thread
        folder.mkdir(parents=True)
        if children is not None:
            (folder / "children").write_text(children)
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter(sorted(listed(folder))))
    assert descendants(7, tmp_path) == [70, 71]
    assert descendants(6, tmp_path) == [], "it has ended"


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
