import os
from pathlib import Path
from typing import Any

import pytest
import torch

from cortex.neuron.engine.memory.device import device_memory
from cortex.neuron.engine.memory.host import HostMemory, anonymous_bytes, read_host_memory


def host(root: Path, files: dict[str, str]) -> HostMemory:
    for name, text in {"proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 800 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_host_memory(root)


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
