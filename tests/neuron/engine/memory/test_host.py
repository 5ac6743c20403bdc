import os
from pathlib import Path
from typing import Any

import pytest
import torch

from cortex.neuron.engine.memory.device import device_memory
from cortex.neuron.engine.memory.host import HostMemory, anonymous_bytes, read_host_memory, usable_cores


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def host(root: Path, files: dict[str, str]) -> HostMemory:
    return read_host_memory(write(root, {"proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 800 kB\n", **files}))


def test_without_cgroup_limits_reports_the_host(tmp_path: Path) -> None:
    assert host(tmp_path, {}) == HostMemory(1000 * 1024, 800 * 1024)


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc/self/cgroup": "0::/box/inner\n",
            "sys/fs/cgroup/box/memory.max": "600000\n",
            "sys/fs/cgroup/box/memory.current": "500000\n",
            "sys/fs/cgroup/box/memory.stat": "anon 1\ninactive_file 100000\n",
            "sys/fs/cgroup/box/inner/memory.max": "max\n",
        },
        {
            "proc/self/cgroup": "9:memory:/not/mounted/here\n1:cpu:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "600000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "500000\n",
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 100000\n",
        },
    ],
    ids=["v2, limit on a parent", "v1, seen from inside a container"],
)
def test_container_has_what_its_limit_leaves(tmp_path: Path, files: dict[str, Any]) -> None:
    assert host(tmp_path, files) == HostMemory(600000, 200000)


def test_unlimited_cgroup_v1_is_no_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "9:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert host(tmp_path, files).total_bytes == 1000 * 1024


def test_anonymous_bytes_of_this_process_and_of_none() -> None:
    assert anonymous_bytes() == pytest.approx(anonymous_bytes(os.getpid()), rel=0.2)
    assert anonymous_bytes(2**22 - 1) == 0


def test_engine_uses_the_limited_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cortex.neuron.engine.memory.device.read_host_memory", lambda: HostMemory(4 << 30, 3 << 30))
    memory = device_memory(torch.device("cpu"))
    assert (memory.total_bytes, memory.free_bytes) == (4 << 30, 3 << 30)


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/pod\n"}, 8),
        ({"proc/self/cgroup": "0::/pod\n", "sys/fs/cgroup/pod/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/pod\n", "sys/fs/cgroup/pod/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/pod\n", "sys/fs/cgroup/pod/cpu.max": "150000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/pod\n", "sys/fs/cgroup/pod/cpu.max": "10000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/pod\n", "sys/fs/cgroup/pod/cpu.max": "1600000 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "300000 100000\n"}, 3),
        ({"proc/self/cgroup": "0::/gone\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/pod\n",
                "sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu/pod/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/pod\n",
                "sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/pod/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
    ],
)
@pytest.mark.usefixtures("eight_cores")
def test_usable_cores_are_those_of_the_tightest_limit(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    assert usable_cores(write(tmp_path, files)) == cores


def test_affinity_limits_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert usable_cores(tmp_path) == 1
