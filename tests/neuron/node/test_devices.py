"""The devices of a node."""

import fcntl
import os
import tempfile
from functools import partial
from pathlib import Path

import pytest

from cortex.neuron.config import NeuronConfig
from cortex.neuron.node import devices as node_devices
from cortex.neuron.node.devices import NodeDevices, inventory_of
from cortex.neuron.node.harness.forecast import Forecast
from cortex.neuron.node.memory.ceilings import Ceilings
from cortex.neuron.worker.discovery import Inventory, with_amd_cards
from cortex.neuron.worker.factory import WorkerFactory
from cortex.neuron.worker.process import WorkerTimeouts
from cortex.wire.node.protocol import Device, Fallback

from ..worker.amd_trees import RADEON, write


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


async def test_health_of_a_device_names_what_its_worker_does_without() -> None:
    host = Inventory((Device(index=0, kind="cpu", name="a CPU", total_bytes=1 << 34),))
    reserve = Forecast(NeuronConfig()).reserve
    devices = NodeDevices(host, WorkerFactory(), WorkerTimeouts(), lambda _: {}, reserve, Ceilings(None, ()))
    assert devices.health()[0].fallbacks == ()
    devices.supervisors[0].fallbacks = {"torch._b": "gone", "torch._a": "other arguments"}
    expected = (Fallback(name="torch._a", reason="other arguments"), Fallback(name="torch._b", reason="gone"))
    assert devices.health()[0].fallbacks == expected
    await devices.close()


def test_a_program_on_the_path_makes_amds_cards_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Inventory((Device(index=0, kind="cpu", name="a CPU", total_bytes=1 << 34),))
    with_cards = partial(with_amd_cards, env={}, root=write(tmp_path / "root", RADEON))
    monkeypatch.setattr(node_devices, "with_amd_cards", with_cards)
    monkeypatch.setattr(node_devices, "missing_packages", lambda: ())
    monkeypatch.setenv("PATH", str(tmp_path))
    kinds = [inventory_of(NeuronConfig(), lambda: host).devices[0].kind]
    (tmp_path / "llama-server").touch(mode=0o755)
    kinds += [inventory_of(NeuronConfig(), lambda: host).devices[0].kind]
    assert kinds == ["cpu", "rocm"]
