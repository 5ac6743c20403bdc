"""The devices of a node."""

import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from cortex.neuron.config import NeuronConfig
from cortex.neuron.node.devices import NodeDevices
from cortex.neuron.node.loading.forecast import Forecast
from cortex.neuron.node.memory.ceilings import Ceilings
from cortex.neuron.worker.discovery import Inventory
from cortex.neuron.worker.factory import WorkerFactory
from cortex.neuron.worker.process import WorkerTimeouts
from cortex.wire.node.protocol import Device


async def test_locks_of_devices_exclude_each_other_and_are_no_files_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cards = tuple(Device(index=index, kind="cuda", name="card", total_bytes=1 << 40) for index in range(2))
    reserve = Forecast(NeuronConfig()).reserve
    devices = NodeDevices(
        Inventory(cards), WorkerFactory(), WorkerTimeouts(), lambda _: {}, reserve, Ceilings(None, ())
    )
    first, again, other = (os.open(devices.lock_path(index), os.O_RDWR) for index in (0, 0, 1))
    for lock in (first, other):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.raises(BlockingIOError):
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(first)
    fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert list(tmp_path.iterdir()) == [], "a daemon that is killed leaves nothing behind"
    await devices.close()
    for lock in (again, other):
        os.close(lock)
